"""How much host time do modules take, forward and backward at tiny shapes, next to the plain torch modules?

python -m bench.host_time

`duotone bench host` has neither LayerNormLinear nor LayerNormMLP, and no modules in fp32 without a recipe.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import duotone
from bench.timing.duel import HostClock, Pace, Timing, duel
from bench.timing.records import emit
from duotone.modules import GroupedLinear, LayerNormLinear, LayerNormMLP

SIZE = 32


class Stack(nn.Module):
    """Modules one after the other."""

    def __init__(self, *parts: nn.Module | Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.parts = parts
        self.registered = nn.ModuleList(part for part in parts if isinstance(part, nn.Module))

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
        lambda: LayerNormLinear(SIZE, SIZE),
        (),
    ),
    "LayerNormMLP": (
        lambda: Stack(nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE), gelu, nn.Linear(SIZE, SIZE)),
        lambda: LayerNormMLP(SIZE, SIZE),
        (),
    ),
    "GroupedLinear, 4 experts": (lambda: Experts(SPLITS), lambda: GroupedLinear(4, SIZE, SIZE), (SPLITS,)),
}


def main() -> None:
    torch.set_num_threads(1)
    dy = torch.randn(SIZE, SIZE)
    for name, (plain, duotones, extra) in PAIRS.items():
        x = torch.randn(SIZE, SIZE, requires_grad=True)
        modules = plain(), duotones()
        leaves = [[x, *module.parameters()] for module in modules]
        timings = duel(
            {
                "torch": lambda: torch.autograd.grad(modules[0](x), leaves[0], dy),  # noqa: B023
                "duotone": lambda: torch.autograd.grad(modules[1](x, *extra), leaves[1], dy),  # noqa: B023
            },
            HostClock(),
            Pace(31, 0.02),
        )
        first, second = timings["torch"], timings["duotone"]
        assert isinstance(first, Timing) and isinstance(second, Timing), timings
        ratios = [b / a for a, b in zip(first.turns, second.turns, strict=True)]
        values = {
            "module": name,
            "torch_us": round(first.median * 1e3, 1),
            "duotone_us": round(second.median * 1e3, 1),
            "ratio": round(statistics.median(ratios), 2),
        }
        emit("cpu", {"question": "host time of a module under Identity, 32x32 fp32, forward+backward", **values})


if __name__ == "__main__":
    main()
