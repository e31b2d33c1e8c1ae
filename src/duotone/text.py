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


def shorten(text: str, length: int) -> str:
    """`text`, with its middle replaced by an ellipsis when it is longer than `length` characters."""
    if len(text) <= length:
        return text
    tail = (length - 1) // 2
    return f"{text[: length - 1 - tail]}…{text[len(text) - tail :]}"


def aligned(rows: Sequence[Sequence[str]], right: Sequence[bool]) -> list[str]:
    """The lines of a table; `right` says which columns stand at the right side."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    ]
