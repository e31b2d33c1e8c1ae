"""How fast linears train under a recipe on a named GPU: a measured table, and interpolation between its shapes."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

Shape = tuple[int, int, int]
"""Tokens, features in, features out."""


@dataclass(frozen=True)
class Speed:
    """The speed over compiled bf16, forward and backward. None if it was not measured. `basis` says how it is known."""

    ratio: float | None
    basis: str


UNKNOWN = Speed(None, "unknown")


@dataclass(frozen=True)
class SpeedTable:
    """Speeds of linears by recipe, as one dated record under bench/results has them."""

    device: str
    date: str
    source: str
    ratios: Mapping[str, Mapping[Shape, float]]

    @property
    def reach(self) -> str:
        """The linears between which speeds are known, in words."""
        shapes = sorted({shape for ratios in self.ratios.values() for shape in ratios}, key=math.prod)
        ends = (f"{inputs} x {outputs} with {tokens} tokens" for tokens, inputs, outputs in (shapes[0], shapes[-1]))
        return f"linears from {' to '.join(ends)}"

    def speed(self, recipe: str, shape: Shape) -> Speed:
        """The speed of a linear: measured, or interpolated over the logarithm of its products; unknown outside."""
        ratios = self.ratios.get(recipe, {})
        if shape in ratios:
            return Speed(ratios[shape], "measured")
        work = math.prod(shape)
        points = sorted((math.prod(size), ratio) for size, ratio in ratios.items())
        for (low, slow), (high, fast) in pairwise(points):
            if low <= work <= high:
                share = math.log(work / low) / math.log(high / low)
                return Speed(slow + (fast - slow) * share, "interpolated")
        return UNKNOWN

    def model_speed(self, parts: Sequence[tuple[str, Shape]]) -> Speed:
        """The speed of linears or GEMMs, each with the recipe of its formats: their time together, unknown if one is.

        Parts of several recipes make a speed that is predicted: no linear that mixes recipes was measured.
        """
        speeds = [self.speed(*part) for part in parts]
        ratios = [speed.ratio for speed in speeds if speed.ratio is not None]
        if not parts or len(ratios) < len(parts):
            return UNKNOWN
        work = [math.prod(shape) for _, shape in parts]
        ratio = sum(work) / sum(part / ratio for part, ratio in zip(work, ratios, strict=True))
        basis = "predicted" if len({recipe for recipe, _ in parts}) > 1 else "measured"
        if basis == "measured" and any(speed.basis != "measured" for speed in speeds):
            basis = "interpolated"
        return Speed(ratio, basis)


def widened(linears: Sequence[tuple[int, int]], width: int) -> list[tuple[int, int]]:
    """(features in, features out) as if the model were `width` wide: as wide as most of its linears have inputs."""
    present = Counter(inputs for inputs, _ in linears).most_common(1)[0][0]
    return [(round(inputs * width / present), round(outputs * width / present)) for inputs, outputs in linears]


def measured() -> SpeedTable:
    """The table that ships, of an NVIDIA H200."""
    table = json.loads(Path(__file__).with_name("speeds.json").read_text())
    ratios: dict[str, dict[Shape, float]] = {}
    for tokens, inputs, outputs, recipe, ratio in table["linears"]:
        ratios.setdefault(recipe, {})[tokens, inputs, outputs] = ratio
    return SpeedTable(table["device"], table["date"], table["source"], ratios)
