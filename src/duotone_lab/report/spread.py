"""Histograms of magnitudes by power of two, with what a block of each format can hold drawn over them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from duotone import formats
from duotone.errors import UserError
from duotone_lab.report.axis import Axis
from duotone_lab.training.schema import RunEntry

PLAIN = {"_rht": "", "_sr": "", "_delayed": "_tensor"}
"""Parts of names of formats that do not change what a block holds, and what stands for them."""

POWERS = 60
RARE = 1e-5
"""Powers of two with a smaller share of the elements, at either end, are not drawn."""

LEFT, RIGHT, TOP, HEIGHT, LINE = 34, 364, 8, 150, 15


@dataclass(frozen=True)
class Reach:
    """The powers of two, `low` to `high`, that one scale of a format holds if the largest magnitude sets it."""

    formats: str
    low: int
    high: int


@dataclass(frozen=True)
class Histogram:
    """The spread of one tensor over all modules: the share of its nonzero elements in each power of two.

    `what` are the values that are spread: magnitudes, or scales.
    """

    role: str
    lowest: int
    shares: Sequence[float]
    reaches: Sequence[Reach] = ()
    what: str = "Magnitudes"

    @property
    def x(self) -> Axis:
        """Powers of two."""
        return Axis.over(self.lowest, self.lowest + len(self.shares), (LEFT, RIGHT), ticks=8, whole=True)

    @property
    def y(self) -> Axis:
        """Percent of the nonzero elements."""
        return Axis.over(0.0, 100 * max(self.shares), (HEIGHT, TOP), ticks=3)

    @property
    def height(self) -> int:
        """Pixels of the chart, with a line for each reach below it."""
        return HEIGHT + 42 + LINE * len(self.reaches)


def histograms(runs: Sequence[RunEntry]) -> list[Histogram]:
    """One for each tensor that the first observed run has; the ranges are those of the formats of all runs."""
    spreads = next((spreads for run in runs if (spreads := run.get("spreads"))), ())
    result = []
    for entry in spreads:
        if entry["plane"] == "rowwise":
            names = {plane["format"] for run in runs for plane in run["statistics"] if plane["role"] == entry["role"]}
            result += histogram(entry["role"], entry["lowest"], entry["counts"], names)
    return result


def histogram(
    role: str, lowest: int, counts: Sequence[int], names: set[str], what: str = "Magnitudes"
) -> list[Histogram]:
    """The histogram of counts by power of two from `lowest` on, with what formats hold; none if all counts are 0."""
    least = RARE * sum(counts)
    used = [index for index, count in enumerate(counts) if count > least]
    if not used:
        return []
    counts = counts[used[0] : used[-1] + 1]
    shares, top = [count / sum(counts) for count in counts], lowest + used[-1]
    return [Histogram(role, lowest + used[0], shares, _reaches(names, top), what)]


def _reaches(names: set[str], top: int) -> list[Reach]:
    """Formats that hold as many powers of two in one line."""
    alike: dict[int, list[str]] = {}
    for name in sorted(names):
        for part, other in PLAIN.items():
            name = name.replace(part, other)
        if (powers := _powers(name)) and name not in alike.setdefault(powers, []):
            alike[powers].append(name)
    return [Reach(", ".join(same), top + 1 - powers, top + 1) for powers, same in sorted(alike.items())]


def _powers(name: str) -> int | None:
    """The powers of two, counted down from that of a block's largest element, that do not become zero in the format."""
    try:
        return _powers_of(formats.get(name))
    except UserError:
        return None


@cache
def _powers_of(fmt: formats.Format) -> int | None:
    x = torch.zeros(POWERS, 128)
    x[:, 0], x[:, 1] = 1.0, 2.0 ** -torch.arange(POWERS)
    survivors = int((fmt.decode(fmt.encode(x), torch.float32)[:, 1] != 0).sum())
    return survivors if survivors < POWERS else None
