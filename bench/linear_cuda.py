"""How long do a linear's forward and backward take on a GPU under each recipe, next to bf16 eager and compiled?

python bench/linear_cuda.py: candidates take turns on a GPU that never idles; medians over six turns. Eager, no bias.
"""

import statistics
from collections.abc import Callable

import torch

import duotone
from _timing import record

SHAPES = ((256, 256, 256), (8192, 4096, 4096), (8192, 4096, 14336), (16384, 8192, 8192))
RECIPES = ("bf16", "fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block", "mxfp8")
TURNS, CALLS = 6, 6


def milliseconds(candidates: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Median time of a call by device events."""
    for run in candidates.values():
        for _ in range(3):
            run()
    found: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(TURNS):
        for name, run in candidates.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(CALLS):
                run()
            end.record()
            end.synchronize()
            found[name].append(start.elapsed_time(end) / CALLS)
    return {name: statistics.median(values) for name, values in found.items()}


def step(module: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, dy: torch.Tensor) -> Callable[[], None]:
    leaves = [x, *module.parameters()]  # type: ignore[attr-defined]

    def run() -> None:
        torch.autograd.grad(module(x), leaves, dy)

    return run


def main() -> None:
    for m, k, n in SHAPES:
        given = {"device": "cuda", "dtype": torch.bfloat16}
        x, dy = torch.randn(m, k, **given, requires_grad=True), torch.randn(m, n, **given)
        plain = torch.nn.Linear(k, n, bias=False, **given)
        candidates = {"torch bf16": step(plain, x, dy), "torch bf16 compiled": step(torch.compile(plain), x, dy)}
        for name in RECIPES:
            recipe = duotone.recipes.load(name)
            ours = duotone.Linear(k, n, bias=False, device="cuda", params_dtype=torch.bfloat16, recipe=recipe)
            candidates[name] = step(ours, x, dy)
        found = milliseconds(candidates)
        base = found["torch bf16 compiled"]
        record(
            "linear forward+backward on a GPU, ms and speed over compiled bf16",
            device=torch.cuda.get_device_name(),
            shape=[m, k, n],
            ms={name: round(value, 3) for name, value in found.items()},
            speed={name: round(base / value, 2) for name, value in found.items()},
        )


if __name__ == "__main__":
    main()
