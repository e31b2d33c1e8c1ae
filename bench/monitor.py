"""What a monitor at every 50th step costs: time and memory of training steps with and without one.

    PYTHONPATH=src python -m bench.monitor > bench/results/DATE-monitor.jsonl

A record a model, recipe and form. Runs of 50 steps with a monitor, which samples the first of them, take turns with
runs of 50 steps without. `cost_percent` is by the medians of whole runs, `sample_percent` by those of their first
steps, which varies less. Memory is the peak of a run. A CPU run only says that everything works.

Recipes may be named: python -m bench.monitor mxfp8. The default takes about ten minutes on an H200.
"""

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from bench.subjects.train import TRAIN, Bench, compile_between, compile_blocks, fused
from bench.timing.case import Settings, Shape, written
from bench.timing.records import emit
from duotone import observe, recipes
from duotone.recipes import Recipe

EVERY, TURNS, WARM = 50, 3, 5
FORMS: dict[str, Callable[..., nn.Module]] = {"the rest compiled": compile_between, "compiled": compile_blocks}
RECIPES = ("fp8-current", "fp8-delayed")


def synchronize(device: str) -> float:
    """The clock after all work of the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def run(bench: Bench, model: nn.Module, device: str, path: Path | None) -> tuple[float, float, float]:
    """`EVERY` steps: seconds, seconds of the first step, and MiB at the peak. With a path, that step is sampled."""
    step = bench.work(model).call
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begin = synchronize(device)
    monitor = None if path is None else observe.Monitor(model, path, every=EVERY + 1)
    step()
    if monitor is not None:
        monitor.step()
    first = synchronize(device) - begin
    for _ in range(EVERY - 1):
        step()
        if monitor is not None:
            monitor.step()
    whole = synchronize(device) - begin
    if monitor is not None:
        monitor.close()
    return whole, first, torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0.0


def measure(device: str, shape: Shape, recipe: Recipe, form: str, folder: Path) -> dict[str, object]:
    bench = Bench.of(Settings(device, (recipe,)), shape)
    model = FORMS[form](fused(bench.twin(), recipe))
    step = bench.work(model).call
    for _ in range(WARM):
        step()
    run(bench, model, device, folder / "warm.jsonl")
    pairs = [
        (run(bench, model, device, None), run(bench, model, device, folder / f"{turn}.jsonl")) for turn in range(TURNS)
    ]
    plain, watched = (
        [statistics.median(values) for values in zip(*runs, strict=True)] for runs in zip(*pairs, strict=True)
    )
    costs = [100 * (after[0] / before[0] - 1) for before, after in pairs]
    return {
        "what": f"a monitor at every {EVERY}th step",
        "shape": written(shape),
        "recipe": recipe.name,
        "form": form,
        "ms": round(1e3 * plain[0] / EVERY, 3),
        "sampled_ms": round(1e3 * watched[1], 3),
        "first_ms": round(1e3 * plain[1], 3),
        "cost_percent": round(100 * (watched[0] / plain[0] - 1), 3),
        "costs_percent": [round(cost, 3) for cost in costs],
        "sample_percent": round(100 * (watched[1] - plain[1]) / plain[0], 3),
        "peak_mib": round(plain[2], 1),
        "memory_percent": round(100 * (watched[2] / plain[2] - 1), 3) if plain[2] else None,
    }


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = sys.argv[1:] or RECIPES
    with tempfile.TemporaryDirectory() as folder:
        for shape in TRAIN.shapes[device]:
            for name in names:
                for form in FORMS:
                    emit(device, measure(device, shape, recipes.load(name), form, Path(folder)))
                    gc.collect()


if __name__ == "__main__":
    main()
