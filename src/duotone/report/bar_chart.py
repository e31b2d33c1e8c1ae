"""The bar chart: one horizontal bar per run, its name and value above it."""

from collections.abc import Sequence
from dataclasses import dataclass

from duotone.report.axis import Axis, round_out
from duotone.report.numbers import finite
from duotone.report.palette import Style

AXIS = (1, 278)


@dataclass(frozen=True)
class Bar:
    """One run's value in the chart's unit, and the text that stands for it."""

    name: str
    style: Style
    value: float | None
    text: str


@dataclass(frozen=True)
class BarChart:
    """What the template draws; the axis starts at zero."""

    title: str
    unit: str
    bars: Sequence[Bar]

    @property
    def axis(self) -> Axis:
        largest = max((bar.value for bar in self.bars if finite(bar.value)), default=1.0)
        return Axis.over(0.0, round_out(0.0, largest or 1.0, ticks=4)[1], AXIS, ticks=4)
