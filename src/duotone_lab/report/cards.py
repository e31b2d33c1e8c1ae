"""A card for each role and direction of a run: magnitudes, scales, amax and limit over steps, planes and channels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from duotone_lab.report.axis import round_out
from duotone_lab.report.line_chart import Curve, Event, LineChart
from duotone_lab.report.numbers import finite, share, significant
from duotone_lab.report.series import Style
from duotone_lab.report.spread import Histogram, histogram
from duotone_lab.training.schema import DriftEntry, OperandEntry, RunEntry

AMAX, LIMIT = Style("s0", "circle", None), Style("s1", "square", "6 4")
WIDTH, HEIGHT = 380, 190


@dataclass(frozen=True)
class Card:
    """One tensor in one direction, which `title` names, over all modules of a run."""

    title: str
    formats: str
    histograms: Sequence[Histogram]
    steps: LineChart | None
    notes: Sequence[str]


def cards(run: RunEntry) -> list[Card]:
    """The cards of a run, none for planes that hold their tensor unchanged."""
    result = []
    for spread in run.get("spreads", ()):
        role, plane, scales = spread["role"], spread["plane"], spread.get("scales")
        if scales is None:
            continue
        names = {entry["format"] for entry in run["statistics"] if (entry["role"], entry["plane"]) == (role, plane)}
        title = f"{role} {plane}"
        pictures = [
            *histogram(title, spread["lowest"], spread["counts"], names),
            *histogram(title, spread["lowest"], scales, set(), "Scales"),
        ]
        steps = [entry for entry in run.get("drift", ()) if (entry["role"], entry["plane"]) == (role, plane)]
        notes = _notes([entry for entry in run.get("operands", ()) if entry["role"] == role])
        result.append(Card(title, ", ".join(sorted(names)), pictures, _steps(steps), notes))
    return result


def _steps(drift: Sequence[DriftEntry]) -> LineChart | None:
    """log2 of the largest magnitude and of the largest that a scale could hold, with steps at which elements clip."""
    curves = []
    for name, key, style in (("amax", "amax", AMAX), ("limit", "limit", LIMIT)):
        points = [
            (float(entry["step"]), math.log2(value)) for entry in drift if finite(value := entry.get(key)) and value
        ]
        if points:
            curves.append(Curve(name, style, [points], points, f"2^{points[-1][1]:.1f}"))
    if not curves:
        return None
    values = [value for curve in curves for _, value in curve.points]
    clips = [
        Event(entry["step"], f"{share(clipped)} % of the elements clip", LIMIT)
        for entry in drift
        if (clipped := entry.get("clipped"))
    ]
    limits = round_out(min(values), max(values), ticks=3)
    return LineChart(curves, limits, False, width=WIDTH, height=HEIGHT, events=clips, is_narrow=True)


def _notes(operands: Sequence[OperandEntry]) -> list[str]:
    """How far the planes of a tensor differ, and which channels stand out, at the worst module."""
    notes = []
    pairs = [(entry["disagreement"], entry["module"]) for entry in operands if entry["disagreement"] is not None]
    if pairs:
        most, module = max(pairs)
        most_words = f"differ by up to {share(most)} % of the tensor, most in {module}" if most else "agree"
        notes.append(f"Rowwise and columnwise {most_words}.")
    standing = [entry for entry in operands if entry["outliers"]]
    if not standing:
        return [*notes, "No channel has 8 times the amax of the median channel."] if operands else notes
    worst = max(standing, key=lambda entry: entry["over_median"] or 0.0)
    return [
        *notes,
        f"Outlier channels in {len(standing)} of {len(operands)} modules, most in {worst['module']}: "
        f"{worst['outliers']} of {worst['channels']} channels; channel {worst['largest_channel']} has "
        f"{significant(worst['over_median'], 2)} times the median amax.",
    ]
