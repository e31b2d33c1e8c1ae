"""Colour. Each run keeps one style in all charts; both colour maps can be read with any colour vision."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from duotone.report.numbers import finite

# The page's style sheet holds the colours themselves (Okabe-Ito), one set for light and one for dark.
SERIES_COLOURS = 6
MARKERS = ("square", "triangle", "diamond", "down", "hourglass")
DASHES = (None, "7 3", "2 3", "9 3 2 3")
VIRIDIS = (
    (68, 1, 84),
    (72, 40, 120),
    (62, 74, 137),
    (49, 104, 142),
    (38, 130, 142),
    (31, 158, 137),
    (53, 183, 121),
    (110, 206, 88),
    (181, 222, 43),
    (253, 231, 37),
)


@dataclass(frozen=True)
class Style:
    """How one run is drawn everywhere: a colour class, a marker, a dash pattern."""

    colour: str
    marker: str
    dash: str | None


def styles(runs: Sequence[Mapping[str, Any]]) -> list[Style]:
    """One style per run: the reference in ink, the noise run in dashed grey, the others in turn."""
    result, turn = [], 0
    for run in runs:
        if run.get("is_reference"):
            result.append(Style("reference", "circle", None))
        elif run.get("is_noise"):
            result.append(Style("noise", "circle", "4 3"))
        else:
            dash = DASHES[turn // SERIES_COLOURS % len(DASHES)]
            result.append(Style(f"s{turn % SERIES_COLOURS}", MARKERS[turn % len(MARKERS)], dash))
            turn += 1
    return result


Paint = tuple[dict[str, str], str | None]
"""The attributes of a filled area, and the class of text upon it."""


class Scale(Protocol):
    """A colour for each value from `low` to `high`."""

    @property
    def low(self) -> float: ...

    @property
    def high(self) -> float: ...

    def paint(self, value: float | None) -> Paint:
        """How an area looks that stands for `value`."""
        ...


@dataclass(frozen=True)
class ViridisScale:
    """Dark violet at `low`, yellow at `high`: equal steps look equal, in grey too."""

    low: float
    high: float

    def paint(self, value: float | None) -> Paint:
        if not finite(value):
            return {"class": "blank"}, None
        place = _fraction(value, self.low, self.high) * (len(VIRIDIS) - 1)
        index = min(int(place), len(VIRIDIS) - 2)
        pairs = zip(VIRIDIS[index], VIRIDIS[index + 1], strict=True)
        red, green, blue = (round(a + (b - a) * (place - index)) for a, b in pairs)
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 110
        return {"fill": f"#{red:02x}{green:02x}{blue:02x}"}, "on-dark" if dark else "on-bright"


@dataclass(frozen=True)
class WarningScale:
    """The page's own ground at `low`, more and more of the warning colour towards `high`."""

    low: float
    high: float

    def paint(self, value: float | None) -> Paint:
        if not finite(value):
            return {"class": "blank"}, None
        return {"class": "warm", "fill-opacity": f"{0.6 * _fraction(value, self.low, self.high):.2f}"}, None


def _fraction(value: float, low: float, high: float) -> float:
    return min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.0
