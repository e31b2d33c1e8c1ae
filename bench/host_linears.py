"""How much host time do eager linears take on a GPU, forward and backward, next to torch's, compiled and not?

python -m bench.host_linears [--unbound]

Eight linears of width 1024, one after the other, at 256 tokens, so that the GPU waits for the host. `--unbound` adds
recipes without bound calls.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import duotone
from bench.timing.records import emit
from duotone.pipeline import bound

WIDTH, ROWS, COUNT, TURNS, STEPS = 1024, 256, 8, 9, 20


def stack(recipe: str) -> nn.Module:
    """The linears, converted unless the recipe is ""."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16, device="cuda") for _ in range(COUNT)]
    model = nn.Sequential(*layers)
    if recipe:
        duotone.convert(model, recipe)
    return model


def step_of(model: Callable[[Tensor], Tensor], parameters: Sequence[Tensor]) -> Callable[[], object]:
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    dy = torch.randn_like(x)
    return lambda: torch.autograd.grad(model(x), [x, *parameters], dy)


def unbound(step: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        most, bound.MOST = bound.MOST, 0
        step()
        bound.MOST = most

    return run


def main() -> None:
    steps: dict[str, Callable[[], object]] = {}
    for name in ("bf16", "bf16, compiled", *(f"{r}{u}" for u in ("", ", unbound") for r in RECIPES)):
        if "unbound" in name and "--unbound" not in sys.argv:
            continue
        recipe = "" if name.startswith("bf16") else name.partition(",")[0]
        model = stack(recipe)
        parameters = list(model.parameters())
        called = torch.compile(model) if "compiled" in name else model
        step = step_of(called, parameters)
        steps[name] = unbound(step) if "unbound" in name else step
    took: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(12):
            step()
        torch.cuda.synchronize()
    for _ in range(TURNS):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(STEPS):
                step()
            took[name].append(1e6 * (time.perf_counter() - start) / STEPS / COUNT)
            torch.cuda.synchronize()
    compiled = took["bf16, compiled"]
    for name, each in took.items():
        ratio = statistics.median(a / b for a, b in zip(each, compiled, strict=True))
        question = f"host time of an eager linear, {ROWS} x {WIDTH} x {WIDTH}, forward and backward"
        values = {"candidate": name, "us": round(statistics.median(each), 1), "over_compiled_bf16": round(ratio, 2)}
        emit("h200", {"question": question, **values})


RECIPES = ("fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4")

if __name__ == "__main__":
    main()
