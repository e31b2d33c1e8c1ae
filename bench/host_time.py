"""How much host time do modules take, forward and backward at tiny shapes, next to the plain torch modules?

python bench/host_time.py

`duotone bench host` has neither LayerNormLinear nor LayerNormMLP, and no modules in fp32 without a recipe.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import duotone
from _timing import record, turns
from duotone import modules

SIZE = 32


class Stack(nn.Module):
    """Modules one after the other."""

    def __init__(self, *parts: nn.Module | Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.parts = parts
        self.held = nn.ModuleList(part for part in parts if isinstance(part, nn.Module))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class Experts(nn.Module):
    """Linears over consecutive rows."""

    def __init__(self, splits: list[int]) -> None:
        super().__init__()
        self.splits = splits
        self.linears = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in splits)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([one(rows) for one, rows in zip(self.linears, x.split(self.splits), strict=True)])


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


SPLITS = [8, 8, 8, 8]
PAIRS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], tuple[Any, ...]]] = {
    "Linear": (lambda: nn.Linear(SIZE, SIZE), lambda: duotone.Linear(SIZE, SIZE), ()),
    "LayerNormLinear": (
        lambda: Stack(nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE)),
        lambda: modules.LayerNormLinear(SIZE, SIZE),
        (),
    ),
    "LayerNormMLP": (
        lambda: Stack(nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE), gelu, nn.Linear(SIZE, SIZE)),
        lambda: modules.LayerNormMLP(SIZE, SIZE),
        (),
    ),
    "GroupedLinear, 4 experts": (lambda: Experts(SPLITS), lambda: modules.GroupedLinear(4, SIZE, SIZE), (SPLITS,)),
}


def main() -> None:
    torch.set_num_threads(1)
    dy = torch.randn(SIZE, SIZE)
    for name, (plain, ours, extra) in PAIRS.items():
        x = torch.randn(SIZE, SIZE, requires_grad=True)
        first, second = plain(), ours()
        leaves = [[x, *module.parameters()] for module in (first, second)]
        seconds = turns(
            {
                "torch": lambda: torch.autograd.grad(first(x), leaves[0], dy),  # noqa: B023
                "duotone": lambda: torch.autograd.grad(second(x, *extra), leaves[1], dy),  # noqa: B023
            },
            rounds=31,
            repeats=200,
        )
        ratios = [b / a for a, b in zip(seconds["torch"], seconds["duotone"], strict=True)]
        record(
            "host time of a module under Identity, 32x32 fp32, forward+backward",
            module=name,
            torch_us=round(statistics.median(seconds["torch"]) * 1e6, 1),
            duotone_us=round(statistics.median(seconds["duotone"]) * 1e6, 1),
            ratio=round(statistics.median(ratios), 2),
        )


if __name__ == "__main__":
    main()
