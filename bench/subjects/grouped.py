"""The subject `grouped`: forward and backward of the linears of eight experts over uneven numbers of rows."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from bench.subjects import layer
from bench.timing.case import BASE, Candidate, Case, Settings, Shape, Subject, Work, require_multiple, written
from bench.timing.duel import clock_for
from duotone.modules import GroupedLinear
from duotone.recipes import Recipe

EXPERTS = 8
ROWS = 128
"""Every expert has a multiple of these."""

SEED = 0
GROUPED_MM = "torch._grouped_mm bf16"


def uneven(rows: int, experts: int = EXPERTS, step: int = ROWS) -> list[int]:
    """`rows` dealt out in pieces of `step`, some experts drawing more than others; a function of the arguments."""
    generator = torch.Generator().manual_seed(SEED)
    popularity = torch.rand(experts, generator=generator) + 0.5
    drawn = torch.multinomial(popularity, rows // step, replacement=True, generator=generator)
    return [step * count for count in torch.bincount(drawn, minlength=experts).tolist()]


class Experts(nn.Module):
    """One nn.Linear after the other."""

    def __init__(self, splits: list[int], width: int, out: int, device: str) -> None:
        super().__init__()
        self.splits = splits
        self.linears = nn.ModuleList(
            nn.Linear(width, out, bias=False, device=device, dtype=layer.DTYPE) for _ in splits
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(self.linears, x.split(self.splits), strict=True)
        return torch.cat([linear(rows) for linear, rows in parts])


class GroupedMM(nn.Module):
    """torch._grouped_mm over one weight (experts, out, width)."""

    offsets: Tensor

    def __init__(self, splits: list[int], width: int, out: int, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(len(splits), out, width, device=device, dtype=layer.DTYPE))
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)
        ends = torch.tensor(list(itertools.accumulate(splits)), dtype=torch.int32, device=device)
        self.register_buffer("offsets", ends, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight.transpose(-2, -1), offs=self.offsets)  # pyright: ignore


def grouped_linear(count: int, width: int, out: int, device: str, recipe: Recipe) -> nn.Module:
    options = {"bias": False, "device": device, "params_dtype": layer.DTYPE, "recipe": recipe}
    return GroupedLinear(count, width, out, **options)


def candidates(
    settings: Settings,
    shape: Shape,
    splits: list[int],
    finish: Callable[[layer.ForwardBackward], Work] = layer.step_with_peak,
) -> list[Candidate]:
    rows, width, out = shape
    shared = layer.inputs(settings.device, rows, width, out, finish)

    def make(recipe: Recipe) -> nn.Module:
        return grouped_linear(len(splits), width, out, settings.device, recipe)

    entries = layer.of_torch(lambda: Experts(splits, width, out, settings.device), shared)
    if settings.device == "cuda":
        entries += of_grouped_mm(lambda: GroupedMM(splits, width, out, settings.device), shared)
    entries += layer.of_recipes(make, shared, settings, splits)
    if settings.device_splits:
        on_device = torch.tensor(splits, device=settings.device)
        entries += layer.of_recipes(make, shared, settings, on_device, suffix=", device splits")
    return entries


def of_grouped_mm(make: Callable[[], nn.Module], shared: layer.Inputs) -> list[Candidate]:
    return [
        Candidate(f"{GROUPED_MM} eager", lambda: shared.work(make())),
        Candidate(f"{GROUPED_MM} compiled", lambda: shared.work(make(), compiled=True)),
    ]


def base(device: str) -> str:
    """The faster of torch's two forms on CUDA, the one there is elsewhere."""
    return f"{GROUPED_MM} compiled" if device == "cuda" else BASE


def cases(settings: Settings, shape: Shape) -> list[Case]:
    require_multiple("M", shape[0], ROWS)
    clock = clock_for(settings.device)
    return [
        Case(
            f"grouped, {EXPERTS} experts",
            written(shape),
            base(settings.device),
            clock,
            lambda: candidates(settings, shape, uneven(shape[0])),
        )
    ]


GROUPED = Subject(
    "grouped",
    f"Forward and backward of {EXPERTS} experts' linears: M rows in uneven multiples of {ROWS}, K features to N.",
    ("M", "K", "N"),
    {"cuda": ((16384, 4096, 4096), (16384, 4096, 14336)), "cpu": ((2048, 64, 64),)},
    cases,
)
