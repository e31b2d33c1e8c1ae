"""The line chart: one curve per run, markers for held-out values, a label at the end of each curve."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from duotone_lab.report.axis import Axis, spread
from duotone_lab.report.numbers import shorten
from duotone_lab.report.series import Points, Style, thin

LEFT, TOP, BOTTOM = 54, 12, 46
NARROW = 340
CHARACTER = 8.4
HOVER_POINTS = 30


@dataclass(frozen=True)
class Curve:
    """One run on a chart. Points are joined within a stretch only. At `broken_at` its loss is not finite."""

    name: str
    style: Style
    stretches: list[Points]
    marks: Points
    end: str
    broken_at: float | None = None

    @property
    def points(self) -> Points:
        """The points of all stretches."""
        return [point for stretch in self.stretches for point in stretch]


@dataclass(frozen=True)
class Event:
    """What happened to a run at a step, in words."""

    step: int
    text: str
    style: Style


@dataclass(frozen=True)
class Label:
    """A curve in the legend: the pixel of its end, that of its label, and whether it reaches the last step."""

    curve: Curve
    height: float
    at: float
    is_whole: bool


@dataclass(frozen=True)
class LineChart:
    """Curves in a frame: the positions that the template draws. `band` shades values from minus to plus itself.

    The legend of a narrow chart stands below it.
    """

    curves: Sequence[Curve]
    y_limits: tuple[float, float]
    hover: bool
    band: float | None = None
    width: int = 580
    height: int = 390
    longest_name: int = 16
    events: Sequence[Event] = ()
    is_narrow: bool = False

    @property
    def narrow(self) -> "LineChart":
        """The chart for a window of a phone."""
        return replace(self, width=NARROW, height=min(self.height, 300), hover=False, is_narrow=True)

    @cached_property
    def x(self) -> Axis:
        """Steps, up to where the longest label still fits."""
        steps = [step for curve in self.curves for step, _ in [*curve.points, *curve.marks]]
        steps += [event.step for event in self.events]
        limits = min(steps), max(steps)
        if self.is_narrow:
            return Axis.over(*limits, (LEFT, self.width - 14), ticks=4, whole=True)
        longest = max(len(shorten(curve.name, self.longest_name)) + 1 + len(curve.end) for curve in self.curves)
        return Axis.over(*limits, (LEFT, self.width - 38 - CHARACTER * longest), ticks=6, whole=True)

    @cached_property
    def y(self) -> Axis:
        """The losses between `y_limits`, upwards."""
        return Axis.over(*self.y_limits, (self.height - BOTTOM, TOP))

    def path(self, curve: Curve) -> str:
        """The path of one curve. Beyond the frame the clip hides it; no coordinate gets far out."""
        x, y = self.x, self.y
        height = y.start - y.end
        scale = height / (y.high - y.low)

        def pixel(step: float, value: float) -> str:
            raw = y.start - (value - y.low) * scale
            return f"{x.position(step):.1f} {min(max(raw, y.end - height), y.start + height):.1f}"

        return "".join("M" + "L".join(pixel(*point) for point in thin(stretch)) for stretch in curve.stretches)

    def hover_points(self, curve: Curve) -> Points:
        """Unseen points that have a text, inside the frame."""
        points = thin(curve.points, HOVER_POINTS) if self.hover else []
        return [(step, value) for step, value in points if self.y.low <= value <= self.y.high]

    def height_before_break(self, curve: Curve) -> float:
        """The pixel of the last value before the curve stops being a number."""
        before = [value for step, value in curve.points if curve.broken_at is not None and step < curve.broken_at]
        return self.y.position(before[-1]) if before else self.y.end

    def labels(self) -> list[Label]:
        """The legend: name and last value of each curve, at the height of its end or in the nearest free place."""
        ends = [(curve.marks or curve.points, curve) for curve in self.curves]
        lasts = [(self.y.position(points[-1][1]), points[-1][0], curve) for points, curve in ends if points]
        lasts.sort(key=lambda last: last[0])
        places = spread([height for height, _, _ in lasts], self.y.end + 6, self.y.start)
        return [
            Label(curve, height, at, step >= self.x.high)
            for (height, step, curve), at in zip(lasts, places, strict=True)
        ]
