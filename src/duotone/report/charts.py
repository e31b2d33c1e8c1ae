"""Which charts the page has, and how a result becomes their curves, bars and cells."""

from collections.abc import Mapping, Sequence
from typing import Any

from duotone.report.axis import round_out
from duotone.report.bar_chart import Bar, BarChart
from duotone.report.heat_map import ColourBar, HeatMap
from duotone.report.line_chart import Curve, Frame, LineChart
from duotone.report.numbers import UNITS, finite, number, percent, significant, size, size_unit
from duotone.report.palette import Style, ViridisScale, WarningScale
from duotone.report.planes import is_exact, share_grid, signal_grid
from duotone.report.series import Points, first_broken, gaps, pieces, quantile, smooth, window_of
from duotone.report.verdict import noise_gap, reference_of

Run = Mapping[str, Any]
MEMORY = (
    ("Peak memory", "peak_memory_bytes"),
    ("Weights", "weight_bytes"),
    ("Saved activations", "saved_activation_bytes"),
)


def smoothing(runs: Sequence[Run]) -> int:
    """The steps that every training curve of the page is averaged over."""
    return window_of(max((len(run["train_loss"]) for run in runs), default=0))


def loss_chart(result: Mapping[str, Any], styles: Sequence[Style], hover: bool) -> LineChart | None:
    """Training loss as lines, held-out loss as markers; None without a single value."""
    window = smoothing(result["runs"])
    curves = []
    for run, style in zip(result["runs"], styles, strict=True):
        last = run["final_heldout_loss"]
        end = _end(number(last if last is not None else run["final_train_loss"], 3), run)
        curves.append(_curve(run["name"], style, run["train_loss"], run["heldout_loss"], end, window))
    values = _values(curves)
    if not values:
        return None
    values = _values(_whole(curves)) or values
    starts = [stretch[0][1] for curve in curves for stretch in curve.stretches[:1]]
    ceiling = 1.25 * quantile(starts, 0.5) if starts else max(values)
    frame = Frame(
        label=f"Loss over steps. Last held-out loss: {_ends(curves)}",
        x_title="step",
        y_title="loss (nats per token)",
        x_limits=_steps(curves),
        y_limits=round_out(min(values), min(max(values), ceiling)),
        unit="nats",
    )
    return LineChart(frame, curves, hover)


def gap_chart(result: Mapping[str, Any], styles: Sequence[Style], hover: bool) -> LineChart | None:
    """How far each run is from the reference at the same step, in percent; None without a comparison."""
    reference = reference_of(result)
    if reference is None:
        return None
    window = smoothing(result["runs"])
    curves = []
    for run, style in zip(result["runs"], styles, strict=True):
        train = gaps(run["train_loss"], reference["train_loss"])
        heldout = gaps(run["heldout_loss"], reference["heldout_loss"])
        if run is reference:
            curves.append(_curve(run["name"], style, train, [], "", window))
        else:
            end = _end(percent(run["gap_percent"], sign=True), run)
            curves.append(_curve(run["name"], style, train, heldout, end, window))
    if not _values([curve for curve, run in zip(curves, result["runs"], strict=True) if run is not reference]):
        return None
    frame = Frame(
        label=f"Gap to {reference['name']} over steps. Last held-out gap: {_ends(curves)}",
        x_title="step",
        y_title=f"loss above {reference['name']} (%)",
        x_limits=_steps(curves),
        y_limits=_gap_limits(curves, noise_gap(result) or 0.0),
        unit="%",
        band=noise_gap(result),
    )
    return LineChart(frame, curves, hover)


def bar_charts(runs: Sequence[Run], styles: Sequence[Style]) -> list[BarChart]:
    """Step time and the three kinds of memory."""
    pairs = list(zip(runs, styles, strict=True))
    time = [Bar(run["name"], style, run["step_ms"], f"{significant(run['step_ms'])} ms") for run, style in pairs]
    charts = [BarChart("Step time", "ms", time)]
    for title, field in MEMORY:
        unit = size_unit([run[field] for run in runs if finite(run[field])])
        scale = 1024 ** UNITS.index(unit)
        bars = [
            Bar(run["name"], style, None if run[field] is None else run[field] / scale, size(run[field]))
            for run, style in pairs
        ]
        charts.append(BarChart(title, unit, bars))
    return charts


def signal_maps(runs: Sequence[Run], hover: bool) -> tuple[ColourBar | None, list[HeatMap | None]]:
    """One colour bar, and per run a heat map on the shared scale; None for a run without an inexact plane."""
    shown = [run for run in runs if run["statistics"] and not is_exact(run)]
    values = [entry["snr_db"] for run in shown for entry in run["statistics"] if finite(entry["snr_db"])]
    if not shown:
        return None, [None] * len(runs)
    scale = ViridisScale(*round_out(min(values, default=0.0), max(values, default=1.0)))
    bar = ColourBar(
        scale,
        "signal-to-noise (dB), the same scale for all recipes",
        f"Colour scale of the signal-to-noise maps, {scale.low:g} to {scale.high:g} dB",
    )
    label = "Signal-to-noise in dB of {}, by module, role and plane"
    maps = [
        HeatMap(signal_grid(run["statistics"]), scale, label.format(run["name"]), hover)
        if any(run is other for other in shown)
        else None
        for run in runs
    ]
    return bar, maps


def share_maps(runs: Sequence[Run]) -> list[tuple[str, HeatMap, ColourBar]]:
    """For underflow and saturation: a title, the map of recipes by planes, and its colour bar."""
    shown = [run for run in runs if run["statistics"] and not is_exact(run)]
    result = []
    for field in ("underflow", "saturation"):
        grid = share_grid(shown, field)
        values = [cell.value for cell in grid.cells.values() if finite(cell.value)]
        if not values:
            continue
        scale = WarningScale(0.0, round_out(0.0, max(values) or 1.0)[1])
        label = f"Share of {field} in percent, mean over modules, by recipe, role and plane"
        bar = ColourBar(scale, f"{field} (% of elements)", f"Colour scale of {field}, 0 to {scale.high:g} percent")
        result.append((field, HeatMap(grid, scale, label), bar))
    return result


def _curve(
    name: str,
    style: Style,
    train: Sequence[Sequence[float | None]],
    heldout: Sequence[Sequence[float | None]],
    end: str,
    window: int,
) -> Curve:
    stretches = [smooth(stretch, window) for stretch in pieces(train)]
    marks = [point for stretch in pieces(heldout) for point in stretch]
    return Curve(name, style, stretches, marks, end, first_broken(train))


def _end(text: str, run: Run) -> str:
    """What the label at the end of a curve says after the name."""
    curves = (run["train_loss"], run["heldout_loss"])
    return "diverged" if any(first_broken(curve) is not None for curve in curves) else text


def _ends(curves: Sequence[Curve]) -> str:
    return ", ".join(f"{curve.name} {curve.end}" for curve in curves if curve.end)


def _whole(curves: Sequence[Curve]) -> list[Curve]:
    """The curves that are finite to their end."""
    return [curve for curve in curves if curve.broken_at is None]


def _points(curves: Sequence[Curve]) -> Points:
    return [point for curve in curves for stretch in [*curve.stretches, curve.marks] for point in stretch]


def _values(curves: Sequence[Curve]) -> list[float]:
    return [value for _, value in _points(curves)]


def _steps(curves: Sequence[Curve]) -> tuple[float, float]:
    steps = [step for step, _ in _points(curves)]
    return min(steps), max(steps)


def _gap_limits(curves: Sequence[Curve], noise: float) -> tuple[float, float]:
    """Limits around zero that show nearly every value; a gap beyond 10 % cannot press the small ones flat."""
    per_curve = [_values([curve]) for curve in curves]
    # Of a curve that diverges, the half before it goes far astray counts.
    shares = [0.98 if curve.broken_at is None else 0.5 for curve in curves]
    spans = [quantile(list(map(abs, values)), q) for values, q in zip(per_curve, shares, strict=True) if values]
    most = min(max(spans), max(10.0, 4 * quantile(spans, 0.5)))
    shown = [noise, -noise, *_values(curves)]
    held = [min(max(value, -most), most) for value in shown]
    return round_out(min(0.0, *held), max(0.0, *held))
