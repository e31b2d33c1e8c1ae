"""Each run keeps one style in all charts: colour, marker and dashes."""

from collections.abc import Sequence
from dataclasses import dataclass

from duotone.lab.schema import RunEntry

# The page's style sheet holds the colours themselves (Okabe-Ito), one set for light and one for dark.
SERIES_COLOURS = 6
MARKERS = ("square", "triangle", "diamond", "down", "hourglass")
DASHES = (None, "7 3", "2 3", "9 3 2 3")


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
