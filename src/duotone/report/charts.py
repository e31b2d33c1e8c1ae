"""Which charts the page has, and how a result becomes their curves, bars and cells."""

from collections.abc import Sequence

from duotone.lab.schema import Document, Losses, RunEntry
from duotone.report.axis import round_out
from duotone.report.bar_chart import Bar, BarChart
from duotone.report.heat_map import ColourBar, HeatMap
from duotone.report.line_chart import Curve, Frame, LineChart
from duotone.report.numbers import UNITS, finite, number, percent, significant, size, size_unit
from duotone.report.palette import Style, ViridisScale, WarningScale
from duotone.report.planes import SHARES, is_exact, share_grid, signal_grid
from duotone.report.series import first_broken, gaps, pieces, quantile, smooth, window_of
from duotone.report.verdict import noise_gap, reference_of


def smoothing(runs: Sequence[RunEntry]) -> int:
    """The steps that every training curve of the page is averaged over."""
    return window_of(max((len(run["train_loss"]) for run in runs), default=0))


def loss_chart(result: Document, styles: Sequence[Style], hover: bool) -> LineChart | None:
    """Training loss as lines, held-out loss as markers; None without a single value."""
    curves = []
    for run, style in zip(result["runs"], styles, strict=True):
        last = run["final_heldout_loss"]
        end = number(last if last is not None else run["final_train_loss"], 3)
        curves.append(_curve(run, style, run["train_loss"], run["heldout_loss"], end, smoothing(result["runs"])))
    if not _values(curves):
        return None
    values = _values([curve for curve in curves if curve.broken_at is None]) or _values(curves)
    starts = [curve.points[0][1] for curve in curves if curve.points]
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


def gap_chart(result: Document, styles: Sequence[Style], hover: bool) -> LineChart | None:
    """How far each run is from the reference at the same step, in percent; None without a comparison."""
    reference = reference_of(result)
    if reference is None:
        return None
    curves, others = [], []
    for run, style in zip(result["runs"], styles, strict=True):
        train, heldout = (gaps(run[key], reference[key]) for key in ("train_loss", "heldout_loss"))
        if run is reference:
            curves.append(_curve(run, style, train, [], None, smoothing(result["runs"])))
        else:
            end = percent(run["gap_percent"], sign=True)
            others.append(_curve(run, style, train, heldout, end, smoothing(result["runs"])))
            curves.append(others[-1])
    if not _values(others):
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


def bar_charts(runs: Sequence[RunEntry], styles: Sequence[Style]) -> list[BarChart]:
    """Step time and the three kinds of memory."""
    pairs = list(zip(runs, styles, strict=True))
    time = [Bar(run["name"], style, run["step_ms"], f"{significant(run['step_ms'])} ms") for run, style in pairs]
    charts = [BarChart("Step time", "ms", time)]
    for title, counts in (
        ("Peak memory", [run["peak_memory_bytes"] for run in runs]),
        ("Weights", [run["weight_bytes"] for run in runs]),
        ("Saved activations", [run["saved_activation_bytes"] for run in runs]),
    ):
        unit = size_unit([count for count in counts if finite(count)])
        scale = 1024 ** UNITS.index(unit)
        bars = [
            Bar(run["name"], style, None if count is None else count / scale, size(count))
            for (run, style), count in zip(pairs, counts, strict=True)
        ]
        charts.append(BarChart(title, unit, bars))
    return charts


def signal_maps(runs: Sequence[RunEntry], hover: bool) -> tuple[ColourBar | None, list[HeatMap | None]]:
    """One colour bar, and per run a heat map on the shared scale; None for a run without an inexact plane."""
    inexact = [bool(run["statistics"]) and not is_exact(run) for run in runs]
    if not any(inexact):
        return None, [None] * len(runs)
    entries = [entry for run, shown in zip(runs, inexact, strict=True) if shown for entry in run["statistics"]]
    values = [entry["snr_db"] for entry in entries if finite(entry["snr_db"])]
    scale = ViridisScale(*round_out(min(values, default=0.0), max(values, default=1.0)))
    bar = ColourBar(
        scale,
        "signal-to-noise (dB), the same scale for all recipes",
        f"Colour scale of the signal-to-noise maps, {scale.low:g} to {scale.high:g} dB",
    )
    label = "Signal-to-noise in dB of {}, by module, role and plane"
    maps = [
        HeatMap(signal_grid(run["statistics"]), scale, label.format(run["name"]), hover) if shown else None
        for run, shown in zip(runs, inexact, strict=True)
    ]
    return bar, maps


def share_maps(runs: Sequence[RunEntry]) -> list[tuple[str, HeatMap, ColourBar]]:
    """For underflow and saturation: a title, the map of recipes by planes, and its colour bar."""
    shown = [run for run in runs if run["statistics"] and not is_exact(run)]
    result = []
    for field in SHARES:
        grid = share_grid(shown, field)
        values = [cell.value for cell in grid.cells.values() if finite(cell.value)]
        if not values:
            continue
        scale = WarningScale(0.0, round_out(0.0, max(values) or 1.0)[1])
        label = f"Share of {field} in percent, mean over modules, by recipe, role and plane"
        bar = ColourBar(scale, f"{field} (% of elements)", f"Colour scale of {field}, 0 to {scale.high:g} percent")
        result.append((field, HeatMap(grid, scale, label), bar))
    return result


def _curve(run: RunEntry, style: Style, train: Losses, heldout: Losses, end: str | None, window: int) -> Curve:
    """The curve of a run. `end` is what its label says after the name, unless the run diverged; None for nothing."""
    marks = [point for stretch in pieces(heldout) for point in stretch]
    if end is not None and any(first_broken(run[key]) is not None for key in ("train_loss", "heldout_loss")):
        end = "diverged"
    stretches = [smooth(stretch, window) for stretch in pieces(train)]
    return Curve(run["name"], style, stretches, marks, end or "", first_broken(train))


def _ends(curves: Sequence[Curve]) -> str:
    return ", ".join(f"{curve.name} {curve.end}" for curve in curves if curve.end)


def _values(curves: Sequence[Curve]) -> list[float]:
    return [value for curve in curves for _, value in [*curve.points, *curve.marks]]


def _steps(curves: Sequence[Curve]) -> tuple[float, float]:
    steps = [step for curve in curves for step, _ in [*curve.points, *curve.marks]]
    return min(steps), max(steps)


def _gap_limits(curves: Sequence[Curve], noise: float) -> tuple[float, float]:
    """Limits around zero that show nearly every value; a gap beyond 10 % cannot press the small ones flat."""
    spans = []
    for curve in curves:
        sizes = [abs(value) for value in _values([curve])]
        if sizes:  # of a curve that diverges, the half before it goes far astray counts
            spans.append(quantile(sizes, 0.98 if curve.broken_at is None else 0.5))
    most = min(max(spans), max(10.0, 4 * quantile(spans, 0.5)))
    limited = [min(max(value, -most), most) for value in (noise, -noise, *_values(curves))]
    return round_out(min(0.0, *limited), max(0.0, *limited))
