"""Curves made ready for drawing: cut where they stop being finite, smoothed, thinned, compared, each with a style."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from duotone_lab.report.numbers import broken, finite
from duotone_lab.training.schema import Losses, RunEntry

Points = list[tuple[float, float]]
MOST_POINTS = 300

# The page's style sheet holds the colours themselves (Okabe-Ito), one set for light and one for dark.
SERIES_COLOURS = 6
MARKERS = ("square", "triangle", "diamond", "down", "hourglass")
DASHES = (None, "7 3", "2 3", "9 3 2 3")


def window_of(count: int) -> int:
    """The steps that the smoothing of a curve of `count` points averages: odd, about a twenty-fifth of it."""
    return max(1, count // 25 // 2 * 2 + 1)


def pieces(curve: Losses) -> list[Points]:
    """The stretches of `curve` between values that are missing or not finite."""
    stretches = groupby(curve, key=lambda point: finite(point[1]))
    return [
        [(step, value) for step, value in stretch if value is not None] for drawable, stretch in stretches if drawable
    ]


def smooth(points: Points, window: int) -> Points:
    """The centred mean of `window` points; near the start of as many as both sides have, near the end of all.

    So a steep start is not flattened, and the last value is not a single step's.
    """
    result = []
    for index, (step, _) in enumerate(points):
        reach = min(window // 2, index)
        values = [value for _, value in points[index - reach : index + reach + 1]]
        result.append((step, sum(value / len(values) for value in values)))
    return result


def thin(points: Points, most: int = MOST_POINTS) -> Points:
    """At most about `most` of `points`, evenly spaced, with the last one."""
    stride = -(-len(points) // most)
    return points if stride <= 1 else [*points[:-1:stride], points[-1]]


def gaps(curve: Losses, reference: Losses) -> Losses:
    """How far `curve` is above `reference`, in percent of it, where the reference has a number."""
    base = {step: value for step, value in reference if finite(value) and value != 0}
    return [
        (step, value if value is None else 100.0 * (value - base[step]) / abs(base[step]))
        for step, value in curve
        if step in base
    ]


def mean_gaps(pairs: Sequence[tuple[Losses, Losses]]) -> Losses:
    """The mean of the `gaps` of several pairs of curve and reference, at the steps that all of them have."""
    curves = [dict(gaps(curve, reference)) for curve, reference in pairs]
    shared = [step for step in curves[0] if all(step in curve for curve in curves)]
    values = [[value for curve in curves if (value := curve[step]) is not None] for step in shared]
    means = [sum(each) / len(each) if len(each) == len(curves) else None for each in values]
    return list(zip(shared, means, strict=True))


def first_broken(curve: Losses) -> int | None:
    """The first step at which `curve` is NaN or infinite, or None."""
    return next((step for step, value in curve if broken(value)), None)


def quantile(values: Sequence[float], q: float) -> float:
    """The value below which a share `q` of `values` lies; no interpolation."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


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
