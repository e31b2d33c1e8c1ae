"""Tables: drawn with lines on a terminal, aligned plain text elsewhere."""

import sys
from collections.abc import Sequence

import click

WIDE = 1 << 16
"""Characters of a line that nobody folds."""


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> None:
    """Print `rows` of texts under `columns`; columns of numbers align to the right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout.isatty()
    plain = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table = Table(title=title or None, title_justify="left") if terminal else plain
    for index, column in enumerate(columns):
        is_number = all(row[index][:1] in set("0123456789+-") or row[index] == "" for row in rows)
        table.add_column(Text(column), justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    if terminal:
        Console().print(table)
        return
    console = Console(width=WIDE, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    click.echo("\n".join([*([title] if title else []), *map(str.rstrip, capture.get().splitlines())]))
