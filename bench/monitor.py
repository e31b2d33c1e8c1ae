"""What a monitor at every 50th step costs: time and memory of training steps with and without one.

    PYTHONPATH=src python -m bench.monitor > bench/results/DATE-monitor.jsonl

A record a form and shape. Short runs whose first step a monitor samples take turns with runs without one. What a
sampled step adds to a run, its writing in the step after it included, is spread over 50 steps: `cost_percent` is by
medians. Memory is the peak of a run. A CPU run only says that everything works.

Recipes may be named: python -m bench.monitor mxfp8. The default, fp8-current, takes about two minutes on an H200.
"""

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch._dynamo
from torch import nn

from bench.subjects.train import TRAIN, Bench, compile_between, compile_blocks, fused
from bench.timing.case import Settings, Shape, written
from bench.timing.records import RECOMPILES, emit
from duotone import observe, recipes
from duotone.recipes import Recipe

EVERY, TURNS, STEPS, WARM = 50, 9, 3, 3
FORMS: dict[str, Callable[..., nn.Module]] = {"the rest compiled": compile_between, "compiled": compile_blocks}


def clock(device: str) -> float:
    """The time after all work of the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def run(bench: Bench, model: nn.Module, device: str, path: Path | None) -> tuple[float, float]:
    """ms of `STEPS` steps, and MiB at their peak. With a path, a monitor samples the first of them."""
    step = bench.work(model).call
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begin = clock(device)
    with nullcontext() if path is None else observe.Monitor(model, path, every=EVERY) as monitor:
        for _ in range(STEPS):
            step()
            if monitor is not None:
                monitor.step()
        ms = 1e3 * (clock(device) - begin)
    return ms, torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0.0


def measure(device: str, shape: Shape, recipe: Recipe, form: str, folder: Path) -> dict[str, object]:
    bench = Bench.of(Settings(device, (recipe,)), shape)
    with torch._dynamo.config.patch(recompile_limit=RECOMPILES, accumulated_recompile_limit=RECOMPILES):
        model = FORMS[form](fused(bench.twin(), recipe))
        for _ in range(WARM):
            run(bench, model, device, None)
        run(bench, model, device, folder / "warm.jsonl")
        pairs = [
            (run(bench, model, device, None), run(bench, model, device, folder / f"{turn}.jsonl"))
            for turn in range(TURNS)
        ]
    added = [watched[0] - plain[0] for plain, watched in pairs]
    ms = statistics.median(plain[0] for plain, _ in pairs) / STEPS
    peak, watched_peak = (max(side[1] for side in sides) for sides in zip(*pairs, strict=True))
    return {
        "what": f"a monitor at every {EVERY}th step",
        "shape": written(shape),
        "recipe": recipe.name,
        "form": form,
        "ms": round(ms, 3),
        "sample_adds_ms": round(statistics.median(added), 3),
        "cost_percent": round(100 * statistics.median(added) / (EVERY * ms), 3),
        "costs_percent": [round(100 * each / (EVERY * ms), 3) for each in sorted(added)],
        "peak_mib": round(peak, 1),
        "memory_percent": round(100 * (watched_peak / peak - 1), 3) if peak else None,
    }


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or ["fp8-current"]:
            for form in FORMS:
                for shape in reversed(TRAIN.shapes[device]):
                    emit(device, measure(device, shape, recipes.load(name), form, Path(folder)))
                    gc.collect()


if __name__ == "__main__":
    main()
