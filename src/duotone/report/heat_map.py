"""The heat map: coloured cells in rows and columns, each with its number."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from duotone.report.numbers import broken
from duotone.report.palette import Paint, Scale

LONGEST_LABEL, CHARACTER = 26, 6.1

Column = tuple[str, str]


@dataclass(frozen=True)
class Cell:
    """A value for the colour, its text, and what hovering adds. A value of None is drawn without colour."""

    value: float | None
    text: str
    title: str = ""


@dataclass(frozen=True)
class Grid:
    """Cells by row and column. A column is a pair: the heading it shares with its neighbours, and its name."""

    rows: Sequence[str]
    columns: Sequence[Column]
    cells: Mapping[tuple[str, Column], Cell]

    def headings(self) -> Iterator[tuple[str, int, list[str]]]:
        """Each heading with the index of its first column, and the names of its columns."""
        first = 0
        for heading, members in groupby(self.columns, key=lambda column: column[0]):
            names = [name for _, name in members]
            yield heading, first, names
            first += len(names)


@dataclass(frozen=True)
class HeatMap:
    """A grid and its colours, as the template draws them: row names on the left, headings on top."""

    grid: Grid
    scale: Scale
    hover: bool = True

    @property
    def left(self) -> int:
        """The width of the row names in pixels."""
        return 12 + round(CHARACTER * min(LONGEST_LABEL, max(map(len, self.grid.rows), default=0)))

    def paint(self, cell: Cell) -> Paint:
        """As `Scale.paint`; a value that is not finite has a look of an error."""
        return ({"class": "bad"}, None) if broken(cell.value) else self.scale.paint(cell.value)
