"""Tables: drawn with lines on a terminal, aligned plain text elsewhere."""

import sys
from collections.abc import Sequence

import click

from duotone.text import aligned

NUMBER = set("0123456789+-")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> None:
    """Print `rows` of texts under `columns`; columns of numbers align to the right."""
    right = [all(not row[index] or row[index][0] in NUMBER for row in rows) for index in range(len(columns))]
    if not sys.stdout.isatty():
        click.echo("\n".join([*([title] if title else []), *aligned([columns, *rows], right)]))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left")
    for column, is_right in zip(columns, right, strict=True):
        table.add_column(Text(column), justify="right" if is_right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)
