"""The heat map: coloured cells in rows and columns, each with its number; and the legend of the colours."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from duotone.report.axis import Axis
from duotone.report.numbers import broken
from duotone.report.palette import Scale
from duotone.report.svg import picture, shorten, tag

CELL_WIDTH, CELL_HEIGHT, HEAD = 56, 20, 38
LONGEST_LABEL = 26
CHARACTER = 6.1
BAR_WIDTH, BAR_HEIGHT = 360, 46

Column = tuple[str, str]


@dataclass(frozen=True)
class Cell:
    """A value for the colour, its text, and what hovering adds. A value of None is drawn without colour."""

    value: float | None
    text: str
    title: str = ""


@dataclass(frozen=True)
class Grid:
    """Cells by row and column. A column is a pair: the heading it shares with its neighbours, and its own."""

    rows: Sequence[str]
    columns: Sequence[Column]
    cells: Mapping[tuple[str, Column], Cell]


def heat_map(grid: Grid, scale: Scale, label: str, hover: bool = True) -> Markup:
    """The grid as SVG, with row names on the left and headings on top."""
    left = 12 + round(CHARACTER * min(LONGEST_LABEL, max(map(len, grid.rows), default=0)))
    rows = [_row(grid, row, left, HEAD + index * CELL_HEIGHT, scale, hover) for index, row in enumerate(grid.rows)]
    width = left + CELL_WIDTH * len(grid.columns) + 2
    height = HEAD + CELL_HEIGHT * len(grid.rows) + 2
    return picture(label, width, height, *_heading(grid.columns, left), *rows, class_="heat")


def colour_bar(scale: Scale, title: str, label: str) -> Markup:
    """The legend of a scale: its colours from low to high, with ticks."""
    axis = Axis.over(scale.low, scale.high, (22, BAR_WIDTH - 22))
    count = 48
    wide = (axis.end - axis.start) / count
    parts = []
    for index in range(count):
        value = axis.low + (axis.high - axis.low) * (index + 0.5) / count
        paint, _ = scale.paint(value)
        parts.append(tag("rect", x=axis.start + index * wide, y=16, width=wide, height=11, **paint))
    edge = tag("rect", class_="edge", x=axis.start, y=16, width=axis.end - axis.start, height=11)
    ticks = [
        tag("text", text, class_="tick", x=axis.position(value), y=41, text_anchor="middle")
        for value, text in axis.ticks()
    ]
    heading = tag("text", title, class_="title", x=axis.start, y=11)
    colours = tag("g", *parts, shape_rendering="crispEdges")
    return picture(label, BAR_WIDTH, BAR_HEIGHT, heading, colours, edge, *ticks, class_="bar legend")


def _heading(columns: Sequence[Column], left: int) -> list[Markup]:
    parts, at = [], left
    for group, members in groupby(columns, key=lambda column: column[0]):
        names = [own for _, own in members]
        middle = at + CELL_WIDTH * len(names) / 2
        parts.append(tag("text", group, class_="head", x=middle, y=13, text_anchor="middle"))
        end = at + CELL_WIDTH * len(names)
        parts.append(tag("line", class_="axis", x1=at + 3, x2=end - 3, y1=19, y2=19))
        for index, own in enumerate(names):
            middle = at + CELL_WIDTH * (index + 0.5)
            parts.append(tag("text", own, class_="subhead", x=middle, y=32, text_anchor="middle"))
        at = end
    return parts


def _row(grid: Grid, row: str, left: int, top: int, scale: Scale, hover: bool) -> Markup:
    name = shorten(row, LONGEST_LABEL)
    full = tag("title", row) if name != row else ""
    parts = [tag("text", name, full, class_="name", x=left - 7, y=14, text_anchor="end")]
    for index, column in enumerate(grid.columns):
        cell = grid.cells.get((row, column))
        if cell is None:
            continue
        paint, ink = ({"class_": "bad"}, None) if broken(cell.value) else scale.paint(cell.value)
        title = tag("title", cell.title) if hover and cell.title else ""
        x = left + CELL_WIDTH * index
        parts.append(tag("rect", title, x=x, width=CELL_WIDTH - 1, height=CELL_HEIGHT - 1, **paint))
        parts.append(tag("text", cell.text, x=x + CELL_WIDTH // 2, y=14, class_=ink))
    return tag("g", *parts, transform=f"translate(0 {top})")
