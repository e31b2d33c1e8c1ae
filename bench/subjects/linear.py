"""The subject `linear`: forward and backward of one linear, no bias."""

from collections.abc import Callable

from torch import nn

import duotone
from bench.subjects import layer
from bench.timing.case import BASE, Candidate, Case, Settings, Shape, Subject, Work, written
from bench.timing.duel import clock_for
from duotone.recipes import Recipe


def plain(width: int, out: int, device: str) -> nn.Module:
    return nn.Linear(width, out, bias=False, device=device, dtype=layer.DTYPE)


def duotone_linear(width: int, out: int, device: str, recipe: Recipe) -> nn.Module:
    return duotone.Linear(width, out, bias=False, device=device, params_dtype=layer.DTYPE, recipe=recipe)


def candidates(
    settings: Settings, shape: Shape, finish: Callable[[layer.ForwardBackward], Work] = layer.step_with_peak
) -> list[Candidate]:
    rows, width, out = shape
    shared = layer.inputs(settings.device, rows, width, out, finish)
    return [
        *layer.of_torch(lambda: plain(width, out, settings.device), shared),
        *layer.of_recipes(lambda recipe: duotone_linear(width, out, settings.device, recipe), shared, settings),
    ]


def cases(settings: Settings, shape: Shape) -> list[Case]:
    return [Case("linear", written(shape), BASE, clock_for(settings.device), lambda: candidates(settings, shape))]


LINEAR = Subject(
    "linear",
    "Forward and backward of one linear: M rows, K features to N.",
    ("M", "K", "N"),
    {
        "cuda": ((8192, 4096, 4096), (8192, 4096, 14336), (16384, 8192, 8192), (8192, 8192, 28672)),
        "cpu": ((256, 256, 256),),
    },
    cases,
)
