"""Timing: candidates side by side, taking turns in one process, and one call on a GPU."""

import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime

import torch


def turns(candidates: dict[str, Callable[[], object]], rounds: int = 15, repeats: int = 1) -> dict[str, list[float]]:
    """Seconds per call, one entry a round; every candidate runs twice before the first round."""
    for run in candidates.values():
        run()
        run()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            start = time.perf_counter()
            for _ in range(repeats):
                run()
            seconds[name].append((time.perf_counter() - start) / repeats)
    return seconds


def milliseconds(call: Callable[[], object], calls: int = 30) -> float:
    """The median of five turns on a CUDA device that does nothing else."""
    turns = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        turns.append(start.elapsed_time(end) / calls)
    return statistics.median(turns)


def record(question: str, **values: object) -> None:
    """Print one JSON line: the question, the machine, the numbers."""
    machine = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
    }
    when = datetime.now(UTC).isoformat(timespec="seconds")
    print(json.dumps({"question": question, "date": when, **machine, **values}), flush=True)
