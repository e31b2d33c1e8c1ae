"""Which charts the page has, and how a result becomes their curves, dots and cells."""

from collections.abc import Sequence

from duotone.text import UNITS
from duotone_lab.report.axis import round_out
from duotone_lab.report.choice import Hardware
from duotone_lab.report.line_chart import Curve, Event, LineChart
from duotone_lab.report.numbers import MINUS, SPACE, finite, number, percent, size
from duotone_lab.report.scatter import Dot, Scatter
from duotone_lab.report.series import Style, first_broken, mean_gaps, pieces, quantile, smooth, window_of
from duotone_lab.report.verdict import compared, gap_text, noise_gap, reference_of
from duotone_lab.training.schema import Document, Losses, RunEntry


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
    return LineChart(curves, round_out(min(values), min(max(values), ceiling)), hover)


def gap_chart(result: Document, styles: Sequence[Style], hover: bool) -> LineChart | None:
    """How far each run is from the reference at the same step, in percent, the mean over seeds; None without one."""
    reference = reference_of(result)
    if reference is None:
        return None
    curves, others = [], []
    for run, style in zip(result["runs"], styles, strict=True):
        repeats = {repeat["seed"]: repeat for repeat in reference.get("repeats", ())}
        by_seed = [(other, repeats[other["seed"]]) for other in run.get("repeats", ()) if other["seed"] in repeats]
        pairs = [(run, reference), *by_seed]
        train = mean_gaps([(curve["train_loss"], base["train_loss"]) for curve, base in pairs])
        heldout = mean_gaps([(curve["heldout_loss"], base["heldout_loss"]) for curve, base in pairs])
        if run is reference:
            curves.append(_curve(run, style, train, [], None, smoothing(result["runs"])))
        else:
            end = percent(run["gap_percent"], sign=True)
            others.append(_curve(run, style, train, heldout, end, smoothing(result["runs"])))
            curves.append(others[-1])
    if not _values(others):
        return None
    noise = noise_gap(result)
    return LineChart(curves, _gap_limits(curves, noise or 0.0), hover, noise)


def drift_chart(runs: Sequence[RunEntry], styles: Sequence[Style], hover: bool) -> LineChart | None:
    """The lowest signal-to-noise of any role and plane in each sampled step; None without an inexact plane."""
    curves = []
    for run, style in zip(runs, styles, strict=True):
        lowest: dict[int, float] = {}
        for entry in run.get("drift", ()):
            if finite(value := entry["snr_db"]):
                lowest[entry["step"]] = min(value, lowest.get(entry["step"], value))
        points = [(float(step), value) for step, value in sorted(lowest.items())]
        if points:
            curves.append(Curve(run["name"], style, [points], points, f"{number(points[-1][1], 1)} dB"))
    values = _values(curves)
    if not curves:
        return None
    return LineChart(curves, round_out(min(values), max(values)), hover, height=300, events=events(runs, styles))


def events(runs: Sequence[RunEntry], styles: Sequence[Style]) -> list[Event]:
    """What happened to all runs, in the order of steps."""
    every = [
        Event(event["step"], f"{run['name']}: {event['text']}", style)
        for run, style in zip(runs, styles, strict=True)
        for event in run.get("events", ())
    ]
    return sorted(every, key=lambda event: event.step)


def scatters(result: Document, styles: Sequence[Style], where: Hardware) -> list[Scatter]:
    """The gap against the speed on that GPU, and against peak memory; none without a gap."""
    runs = [run for run in [reference_of(result), *compared(result)] if run is not None]
    looks = {run["name"]: style for run, style in zip(result["runs"], styles, strict=True)}
    if len(runs) < 2:
        return []
    peaks = [run["peak_memory_bytes"] for run in runs]
    unit = size(max(filter(finite, peaks), default=0)).split(SPACE)[-1]
    scale = 1024 ** UNITS.index(unit)
    fast, lean = [], []
    for run, peak in zip(runs, peaks, strict=True):
        speed, gap = where.speed(run), run["gap_percent"] if finite(run["gap_percent"]) else 0.0
        common = (run["name"], looks[run["name"]], gap, run.get("gap_margin") or 0.0)
        cost = "the reference" if run["is_reference"] else f"{'+' if gap >= 0 else MINUS}{gap_text(run)}"
        ratio = speed.basis if speed.ratio is None else f"{number(speed.ratio, 2)} times, {speed.basis}"
        is_hollow = speed.basis != "measured" and not run["is_reference"]
        fast.append(Dot(*common, speed.ratio, f"{cost}, speed {ratio}", is_hollow))
        lean.append(Dot(*common, peak / scale if finite(peak) else None, f"{cost}, {size(peak)}"))
    charts = [Scatter(f"Gap and speed on an {where.name}", "speed over bf16", fast)]
    return [*charts, Scatter("Gap and peak memory", f"peak memory of a step ({unit})", lean)]


def _curve(run: RunEntry, style: Style, train: Losses, heldout: Losses, end: str | None, window: int) -> Curve:
    """The curve of a run. After the name, its label shows `end` if it is not None, or that the run diverged."""
    marks = [point for stretch in pieces(heldout) for point in stretch]
    if end is not None and any(first_broken(run[key]) is not None for key in ("train_loss", "heldout_loss")):
        end = "diverged"
    stretches = [smooth(stretch, window) for stretch in pieces(train)]
    return Curve(run["name"], style, stretches, marks, end or "", first_broken(train))


def _values(curves: Sequence[Curve]) -> list[float]:
    return [value for curve in curves for _, value in [*curve.points, *curve.marks]]


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
