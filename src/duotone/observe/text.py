"""Text: sizes in units and columns that line up."""

from collections.abc import Sequence

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def in_units(size: int) -> str:
    """Bytes with three significant digits in the unit that fits: 512 B, 1.58 KiB, 2.00 MiB."""
    value, unit = float(size), 0
    while value >= 999.5 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    if unit == 0:
        return f"{size} B"
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {UNITS[unit]}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in rows
    ]
