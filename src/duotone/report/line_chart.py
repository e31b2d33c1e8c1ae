"""The line chart: one curve per run, markers for held-out values, a label at the end of each curve."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from duotone.report.axis import Axis
from duotone.report.palette import Style
from duotone.report.series import Points, thin
from duotone.report.svg import picture, shorten, tag

WIDTH, HEIGHT = 580, 390
LEFT, TOP, BOTTOM = 54, 12, 46
LABEL_GAP, LONGEST_NAME, CHARACTER = 17, 16, 7.3
HOVER_POINTS = 30
# Markers around (0, 0), in units of their radius.
OUTLINES = {
    "square": ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    "triangle": ((0, -1.2), (1.1, 0.9), (-1.1, 0.9)),
    "down": ((0, 1.2), (1.1, -0.9), (-1.1, -0.9)),
    "diamond": ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
    "hourglass": ((-1.1, -1.1), (1.1, -1.1), (-1.1, 1.1), (1.1, 1.1)),
    "cross": (
        *((-1.2, -0.8), (-0.8, -1.2), (0, -0.4), (0.8, -1.2), (1.2, -0.8), (0.4, 0)),
        *((1.2, 0.8), (0.8, 1.2), (0, 0.4), (-0.8, 1.2), (-1.2, 0.8), (-0.4, 0)),
    ),
}


@dataclass(frozen=True)
class Curve:
    """One run on a chart. Points are joined within a stretch only. At `broken_at` its loss is not finite."""

    name: str
    style: Style
    stretches: list[Points]
    marks: Points
    end: str
    broken_at: float | None = None


@dataclass(frozen=True)
class Frame:
    """What a line chart says around its curves. `band` shades values from minus to plus itself."""

    label: str
    x_title: str
    y_title: str
    x_limits: tuple[float, float]
    y_limits: tuple[float, float]
    unit: str
    band: float | None = None


def line_chart(frame: Frame, curves: Sequence[Curve], key: str, hover: bool = True) -> Markup:
    """The chart as SVG. `key` is an identifier of the page that no other chart has."""
    longest = max(len(shorten(curve.name, LONGEST_NAME)) + 1 + len(curve.end) for curve in curves)
    right = WIDTH - 38 - CHARACTER * longest
    x = Axis.over(*frame.x_limits, (LEFT, right), ticks=6, whole=True)
    y = Axis.over(*frame.y_limits, (HEIGHT - BOTTOM, TOP))
    box = {"x": LEFT, "y": TOP, "width": right - LEFT, "height": HEIGHT - BOTTOM - TOP}
    clip = tag("clipPath", tag("rect", **box), id=f"{key}-frame")
    lines = [_line(curve, x, y) for curve in curves]
    marks = [_marks(curve, x, y, frame.unit, hover) for curve in curves]
    return picture(
        frame.label,
        WIDTH,
        HEIGHT,
        clip,
        *_grid(frame, x, y),
        tag("g", _band(frame, x, y), *lines, clip_path=f"url(#{key}-frame)"),
        *marks,
        *_end_labels(curves, x, y),
        class_="lines",
    )


def marker(shape: str, x: float, y: float, title: str, radius: float = 4.0) -> Markup:
    """A marker centred at a pixel, with hover text."""
    hover = tag("title", title)
    if shape == "circle":
        return tag("circle", hover, class_="mark", cx=x, cy=y, r=radius)
    corners = " ".join(f"{x + radius * dx:.1f},{y + radius * dy:.1f}" for dx, dy in OUTLINES[shape])
    return tag("polygon", hover, class_="mark", points=corners)


def _grid(frame: Frame, x: Axis, y: Axis) -> list[Markup]:
    """Grid lines with their numbers, and the titles of both axes."""
    parts = []
    for value, text in y.ticks():
        at = y.position(value)
        parts.append(tag("line", class_="grid", x1=x.start, x2=x.end, y1=at, y2=at))
        parts.append(tag("text", text, class_="tick", x=x.start - 8, y=at + 4, text_anchor="end"))
    for value, text in x.ticks():
        at = x.position(value)
        parts.append(tag("line", class_="axis", x1=at, x2=at, y1=y.start, y2=y.start + 5))
        parts.append(tag("text", text, class_="tick", x=at, y=y.start + 19, text_anchor="middle"))
    parts.append(tag("line", class_="axis", x1=x.start, x2=x.end, y1=y.start, y2=y.start))
    across, up = (x.start + x.end) / 2, (y.start + y.end) / 2
    named = {"class_": "title", "text_anchor": "middle"}
    parts.append(tag("text", frame.x_title, x=across, y=HEIGHT - 8, **named))
    parts.append(tag("text", frame.y_title, x=14, y=up, transform=f"rotate(-90 14 {up:g})", **named))
    return parts


def _band(frame: Frame, x: Axis, y: Axis) -> Markup:
    """The band of the noise, below the curves."""
    if frame.band is None:
        return Markup("")
    top, bottom = y.position(frame.band), y.position(-frame.band)
    title = tag("title", f"noise: within ±{frame.band:.3g} {frame.unit}")
    size = {"width": x.end - x.start, "height": max(bottom - top, 1.0)}
    return tag("rect", title, class_="band", x=x.start, y=top, **size)


def _line(curve: Curve, x: Axis, y: Axis) -> Markup:
    """The path of one curve. Beyond the frame the clip hides it; no coordinate gets far out."""
    height = y.start - y.end
    scale = height / (y.high - y.low)

    def pixel(step: float, value: float) -> str:
        raw = y.start - (value - y.low) * scale
        return f"{x.position(step):.1f} {min(max(raw, y.end - height), y.start + height):.1f}"

    drawn = [thin(stretch) for stretch in curve.stretches]
    path = "".join("M" + "L".join(pixel(*point) for point in stretch) for stretch in drawn)
    if not path:
        return Markup("")
    look = {"class_": f"line {curve.style.colour}", "stroke_dasharray": curve.style.dash}
    return tag("path", tag("title", curve.name), d=path, **look)


def _marks(curve: Curve, x: Axis, y: Axis, unit: str, hover: bool) -> Markup:
    """Held-out markers, a cross where the curve stops being a number, and unseen points with hover text."""
    points = [point for stretch in curve.stretches for point in stretch]
    parts = []
    for step, value in thin(points, HOVER_POINTS) if hover else ():
        if y.low <= value <= y.high:
            title = tag("title", f"{curve.name}, step {step:g}: {value:.4g} {unit}")
            place = {"cx": x.position(step), "cy": y.position(value)}
            parts.append(tag("circle", title, class_="hover", r=6, **place))
    for step, value in curve.marks:
        if y.low <= value <= y.high:
            title = f"{curve.name}, held-out, step {step:g}: {value:.4g} {unit}"
            parts.append(marker(curve.style.marker, x.position(step), y.position(value), title))
    if curve.broken_at is not None:
        before = [value for step, value in points if step < curve.broken_at]
        height = y.position(before[-1]) if before else y.end
        title = f"{curve.name}: not a finite number from step {curve.broken_at:g}"
        parts.append(marker("cross", x.position(curve.broken_at), height, title, 6.0))
    return tag("g", *parts, class_=curve.style.colour)


def _end_labels(curves: Sequence[Curve], x: Axis, y: Axis) -> list[Markup]:
    """The legend: name and last value of each curve, at the height of its end or where there is room."""
    ends = []
    for curve in curves:
        points = curve.marks or [point for stretch in curve.stretches for point in stretch]
        if points:
            step, value = points[-1]
            ends.append((y.position(value), step >= x.high, curve))
    ends.sort(key=lambda end: end[0])
    heights = _spread([end[0] for end in ends], y.end + 6, y.start)
    parts = []
    for (height, whole, curve), at in zip(ends, heights, strict=True):
        leader = f"M{x.end + 4:.1f} {height:.1f}L{x.end + 17:.1f} {at:.1f}"
        value = tag("tspan", f" {curve.end}", class_="soft")
        children = [
            tag("title", f"{curve.name} {curve.end}"),
            tag("path", class_="leader", d=leader) if whole else "",
            marker(curve.style.marker, x.end + 25, at, curve.name),
            tag("text", shorten(curve.name, LONGEST_NAME), value, x=x.end + 34, y=at + 4),
        ]
        parts.append(tag("g", *children, class_=f"legend {curve.style.colour}"))
    return parts


def _spread(wanted: list[float], top: float, bottom: float) -> list[float]:
    """Ascending heights, a label apart and close to the `wanted` ones, between `top` and `bottom`."""
    gap = min(LABEL_GAP, (bottom - top) / max(len(wanted), 1))
    placed: list[float] = []
    for height in wanted:
        placed.append(max(height, placed[-1] + gap if placed else top))
    limit = bottom
    for index in range(len(placed) - 1, -1, -1):
        placed[index] = min(placed[index], limit)
        limit = placed[index] - gap
    return placed
