"""A case: what is compared at one shape, as candidates that are made one by one."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from bench.timing.duel import WARM_UP, Clock
from duotone.errors import UserError
from duotone.recipes import Recipe

DEFAULT_RECIPES = ("fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4")
BASE = "torch bf16 compiled"
Shape = tuple[int, ...]
DIGITS = 19
"""Of numbers that torch has no integers for."""


@dataclass(frozen=True)
class Settings:
    """What candidates are made of.

    `cached` adds each recipe with cached weights, `compiled` each under torch.compile, `device_splits` each with the
    rows of experts on the device. `tensor` is whose formats a cast has, `sequence` and `vocabulary` are those of the
    model that trains.
    """

    device: str
    recipes: tuple[Recipe, ...]
    cached: bool = False
    compiled: bool = False
    device_splits: bool = False
    tensor: str = "input"
    sequence: int = 2048
    vocabulary: int = 32768


@dataclass(frozen=True)
class Work:
    """One call of a candidate. It does what is measured `steps` times; `amount` is what one step handles.

    `peak_mib` takes one step more and gives the memory that it needs.
    """

    call: Callable[[], object]
    steps: int = 1
    amount: float = 1.0
    peak_mib: Callable[[], float] | None = None

    def graphed(self) -> "Work":
        """The same, where a call replays a CUDA graph of one call."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self.call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.call()
        return replace(self, call=graph.replay, peak_mib=None)


@dataclass(frozen=True)
class Candidate:
    """`make` may raise: the candidate is then a row with the error."""

    name: str
    make: Callable[[], Work]


@dataclass(frozen=True)
class Case:
    """Candidates at one shape, measured against the one called `base`. `unit` is that of amount per second, "" none."""

    what: str
    shape: str
    base: str
    clock: Clock
    candidates: Callable[[], Sequence[Candidate]]
    unit: str = ""
    scale: float = 1.0

    def only(self, texts: Sequence[str]) -> "Case":
        """The case of the base and of the candidates whose name holds one of the texts."""

        def candidates() -> list[Candidate]:
            return [c for c in self.candidates() if c.name == self.base or any(text in c.name for text in texts)]

        return replace(self, candidates=candidates)

    def graphed(self) -> "Case":
        """The case in which each call replays a CUDA graph."""

        def candidates() -> list[Candidate]:
            return [Candidate(c.name, lambda c=c: c.make().graphed()) for c in self.candidates()]

        return replace(self, what=f"{self.what}, CUDA graphs", candidates=candidates)


@dataclass(frozen=True)
class Subject:
    """Something to measure: what its shapes count, the shapes of each kind of device, and its cases at a shape."""

    name: str
    about: str
    dims: tuple[str, ...]
    shapes: dict[str, tuple[Shape, ...]]
    cases: Callable[[Settings, Shape], list[Case]]

    def parse(self, text: str) -> Shape:
        """The shape written as `8192x4096x4096`; UserError where it is none of this subject."""
        parts = text.lower().split("x")
        numbers = all(part.isascii() and part.isdigit() and len(part) < DIGITS and int(part) for part in parts)
        if len(parts) != len(self.dims) or not numbers:
            dims, example = "x".join(self.dims), written(self.shapes["cuda"][0])
            raise UserError(
                f"--shape {text[:80]!r} is not {dims}: give {len(self.dims)} positive whole numbers, such as {example}"
            )
        return tuple(int(part) for part in parts)


def written(shape: Shape) -> str:
    return "x".join(map(str, shape))


def require_multiple(name: str, value: int, of: int) -> None:
    """UserError unless `value`, a dimension called `name`, is a multiple."""
    if value % of:
        near = of * max(1, math.floor(value / of + 0.5))
        raise UserError(f"{name} is {value}, and has to be a multiple of {of}: give {near}, for example")
