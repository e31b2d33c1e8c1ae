"""Colour. Each run keeps one style in all charts; both colour maps can be read with any colour vision."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from duotone.lab.schema import RunEntry
from duotone.report.axis import Axis
from duotone.report.numbers import finite

# The page's style sheet holds the colours themselves (Okabe-Ito), one set for light and one for dark.
SERIES_COLOURS = 6
LEGEND = (22, 338)
MARKERS = ("square", "triangle", "diamond", "down", "hourglass")
DASHES = (None, "7 3", "2 3", "9 3 2 3")
VIRIDIS = "440154 482878 3e4a89 31688e 26828e 1f9e89 35b779 6ece58 b5de2b fde725".split()

Paint = tuple[dict[str, str], str | None]
"""The attributes of a filled area, and the class of text upon it."""


@dataclass(frozen=True)
class Style:
    """How one run is drawn everywhere: a colour class, a marker, a dash pattern."""

    colour: str
    marker: str
    dash: str | None


def styles(runs: Sequence[RunEntry]) -> list[Style]:
    """One style per run: the reference in ink, the noise run in dashed grey, the others in turn."""
    result, turn = [], 0
    for run in runs:
        if run["is_reference"]:
            result.append(Style("reference", "circle", None))
        elif run["is_noise"]:
            result.append(Style("noise", "circle", "4 3"))
        else:
            dash = DASHES[turn // SERIES_COLOURS % len(DASHES)]
            result.append(Style(f"s{turn % SERIES_COLOURS}", MARKERS[turn % len(MARKERS)], dash))
            turn += 1
    return result


@dataclass(frozen=True)
class Scale(ABC):
    """A colour for each value from `low` to `high`."""

    low: float
    high: float

    @property
    def legend(self) -> Axis:
        """The axis of the bar that explains the colours."""
        return Axis.over(self.low, self.high, LEGEND)

    def paint(self, value: float | None) -> Paint:
        """How an area looks that stands for `value`."""
        if not finite(value):
            return {"class": "blank"}, None
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0
        return self._paint(min(max(share, 0.0), 1.0))

    @abstractmethod
    def _paint(self, share: float) -> Paint:
        """Of a value that lies `share` of the way from low to high."""


class ViridisScale(Scale):
    """Dark violet at `low`, yellow at `high`: equal steps look equal, in grey too."""

    def _paint(self, share: float) -> Paint:
        place = share * (len(VIRIDIS) - 1)
        index = min(int(place), len(VIRIDIS) - 2)
        pairs = zip(bytes.fromhex(VIRIDIS[index]), bytes.fromhex(VIRIDIS[index + 1]), strict=True)
        red, green, blue = (round(a + (b - a) * (place - index)) for a, b in pairs)
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 110
        return {"fill": f"#{red:02x}{green:02x}{blue:02x}"}, "on-dark" if dark else "on-bright"


class WarningScale(Scale):
    """The page's own ground at `low`, more and more of the warning colour towards `high`."""

    def _paint(self, share: float) -> Paint:
        return {"class": "warm", "fill-opacity": f"{0.6 * share:.2f}"}, None
