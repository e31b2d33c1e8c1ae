"""The trade-off chart: the gap of each recipe with its interval, against what the recipe gains."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from duotone_lab.report.axis import Axis, round_out, spread
from duotone_lab.report.line_chart import NARROW
from duotone_lab.report.series import Style

LEFT, TOP, BOTTOM = 60, 14, 46
LETTER, LONGEST = 8, 20
"""The pixels of a letter at most, and how many letters of a name stand beside its mark."""

UNKNOWN = 84
"""The pixels left of the axis in which recipes stand whose place on it is not known."""


@dataclass(frozen=True)
class Dot:
    """One recipe: gap in percent, half of its interval, and its place across, None if that is not known."""

    name: str
    style: Style
    gap: float
    margin: float
    across: float | None
    text: str
    is_hollow: bool = False


@dataclass(frozen=True)
class Scatter:
    """Dots in a frame: the positions that the template draws."""

    title: str
    unit: str
    dots: Sequence[Dot]
    width: int = 580
    height: int = 330

    @property
    def narrow(self) -> "Scatter":
        """The chart for a window of a phone."""
        return replace(self, width=NARROW)

    @property
    def has_unknown(self) -> bool:
        """Whether the speed of a dot is not known."""
        return any(dot.across is None for dot in self.dots)

    @cached_property
    def x(self) -> Axis:
        """Contains every dot; dots of unknown speed have a place to the left of it."""
        values = [dot.across for dot in self.dots if dot.across is not None] or [0.0]
        start = LEFT + (UNKNOWN if self.has_unknown else 14)
        return Axis.over(*round_out(min(values), max(values)), (start, self.width - 20))

    @cached_property
    def y(self) -> Axis:
        """Contains every gap, and half of the intervals; of others that dwarf the gaps a part."""
        ends = sorted(abs(dot.gap) + dot.margin for dot in self.dots if dot.margin) or [0.0]
        most = max(3 * max(abs(dot.gap) for dot in self.dots) + 0.1, ends[len(ends) // 2])
        low = max(-most, min(0.0, *(dot.gap - dot.margin for dot in self.dots)))
        high = min(most, max(0.0, *(dot.gap + dot.margin for dot in self.dots)))
        return Axis.over(*round_out(low, high), (self.height - BOTTOM, TOP))

    def place(self, dot: Dot) -> float:
        """The pixel across."""
        return self.x.start - UNKNOWN / 2 if dot.across is None else self.x.position(dot.across)

    def labels(self) -> list[tuple[Dot, float, int]]:
        """Each dot with the height and the side of its name (1 at the right, -1), so that no two names overlap."""
        dots = sorted(self.dots, key=lambda dot: -dot.gap)
        heights = spread([self.y.position(dot.gap) for dot in dots], self.y.end + 6, self.y.start)
        return [(dot, height, self._side(dot, height)) for dot, height in zip(dots, heights, strict=True)]

    def _side(self, dot: Dot, height: float) -> int:
        """Towards the middle, unless the name would cover the mark of another dot there and not at the other side."""
        at, length = self.place(dot), 14 + LETTER * min(len(dot.name), LONGEST)
        sides = (-1, 1) if at > 0.6 * self.width else (1, -1)
        marks = [self.place(other) for other in self.dots if abs(self.y.position(other.gap) - height) < LETTER]
        for side in sides:
            ends = sorted((at, at + side * length))
            if LEFT < ends[0] and ends[1] < self.width and not any(ends[0] < mark < ends[1] for mark in marks):
                return side
        return sides[0]
