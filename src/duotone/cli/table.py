"""Tables: drawn by rich on a terminal, aligned plain text elsewhere."""

import sys
from collections.abc import Sequence

import click


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> None:
    """Print `rows` of texts under `columns`; columns of numbers align to the right."""
    right = [all(_is_number(row[index]) for row in rows) for index in range(len(columns))]
    if sys.stdout.isatty():
        _rich(columns, rows, right, title)
    else:
        click.echo("\n".join([*([title] if title else []), *_plain([columns, *rows], right)]))


def _rich(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool], title: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left")
    for column, aligned in zip(columns, right, strict=True):
        table.add_column(column, justify="right" if aligned else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def _plain(rows: Sequence[Sequence[str]], right: Sequence[bool]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if aligned else cell.ljust(width)
            for cell, width, aligned in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    ]


def _is_number(cell: str) -> bool:
    return cell[:1] in set("0123456789+-") or cell == ""
