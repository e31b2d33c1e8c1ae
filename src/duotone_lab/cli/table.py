"""Tables: drawn with lines on a terminal, aligned plain text elsewhere. And paragraphs below them."""

import sys
import textwrap
from collections.abc import Sequence

import click

from duotone.text import aligned, shorten

NUMBER = set("0123456789+-")
WIDTH = 80
SHORTEST = 12
"""Characters that a shortened text has at least."""


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", fit: int | None = None
) -> None:
    """Print `rows` of texts under `columns`; columns of numbers align to the right.

    Texts of the column `fit` are shortened in their middle, so that lines of plain text have 80 characters.
    """
    if fit is not None:
        widths = [max(map(len, column)) + 2 for column in zip(columns, *rows, strict=True)]
        room = max(SHORTEST, WIDTH - sum(widths) + widths[fit])
        rows = [[shorten(text, room) if at == fit else text for at, text in enumerate(row)] for row in rows]
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


def echo(text: str, indent: str = "") -> None:
    """Print a paragraph in lines of 80 columns; later lines begin with `indent`."""
    click.echo("\n".join(textwrap.wrap(text, WIDTH, break_on_hyphens=False, subsequent_indent=indent)))
