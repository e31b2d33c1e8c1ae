"""The bar chart: one horizontal bar per run, its name and value above it."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from duotone.report.axis import Axis, round_out
from duotone.report.numbers import finite
from duotone.report.palette import Style
from duotone.report.svg import picture, shorten, tag

WIDTH, PITCH, FOOT = 300, 36, 40


@dataclass(frozen=True)
class Bar:
    """One run's value in the chart's unit, and the text that stands for it."""

    name: str
    style: Style
    value: float | None
    text: str


def bar_chart(title: str, unit: str, bars: Sequence[Bar]) -> Markup:
    """The chart as SVG; its axis starts at zero."""
    values = [bar.value for bar in bars if finite(bar.value)]
    _, high = round_out(0.0, max(values, default=1.0) or 1.0, ticks=4)
    axis = Axis.over(0.0, high, (1, WIDTH - 22), ticks=4)
    bottom = PITCH * len(bars) + 4
    parts = []
    for value, text in axis.ticks():
        at = axis.position(value)
        # The grid stands behind the bars alone: names and values are read above them.
        strokes = "".join(f"M{at:.1f} {PITCH * index + 19}v15" for index in range(len(bars)))
        parts.append(tag("path", class_="grid", d=strokes))
        anchor = "start" if value == 0 else "middle"
        parts.append(tag("text", text, class_="tick", x=at, y=bottom + 15, text_anchor=anchor))
    parts.append(tag("text", f"{title} ({unit})", class_="title", x=WIDTH / 2, y=bottom + 32, text_anchor="middle"))
    for index, bar in enumerate(bars):
        top = PITCH * index
        parts.append(tag("text", shorten(bar.name, 24), class_="name", x=1, y=top + 15))
        parts.append(tag("text", bar.text, class_="value", x=WIDTH - 1, y=top + 15, text_anchor="end"))
        if finite(bar.value):
            width = axis.position(bar.value) - axis.start
            hover = tag("title", f"{bar.name}: {bar.text}")
            parts.append(tag("rect", hover, class_=f"fill {bar.style.colour}", x=1, y=top + 21, width=width, height=11))
    label = f"{title} by recipe: " + ", ".join(f"{bar.name} {bar.text}" for bar in bars)
    return picture(label, WIDTH, bottom + FOOT, *parts, class_="bars")
