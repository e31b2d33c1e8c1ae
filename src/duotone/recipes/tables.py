"""Tables of recipe files: their keys, their text as TOML, the size of a file, and texts that fit one line."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

from duotone.errors import RecipeError

Table = dict[str, Any]
"""A table of a recipe file."""

CUSTOM = "custom"
"""The kind of recipes of functions, which no table describes."""

FILE_BYTES = 2**20
MESSAGE = 1000
BARE = re.compile(r"[A-Za-z0-9_-]+")


def is_table(value: object) -> TypeGuard[Table]:
    """Whether a value of a file is a table, whose keys are text in TOML and JSON."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Whether a value is a list, of anything."""
    return isinstance(value, list)


def check_title(title: object) -> None:
    """RecipeError unless `title` is one line that tables and files can show."""
    if not isinstance(title, str):
        raise RecipeError(f"title is {title!r}; it must be a string")
    if not title.isprintable():
        raise RecipeError(f"title is {title[:80]!r}; it must be one line of printable text")


def one_line(text: str) -> str:
    """`text` as one printable line. A long text loses its middle."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return shown if len(shown) <= MESSAGE else f"{shown[: MESSAGE // 2]} ... {shown[-MESSAGE // 2 :]}"


@contextmanager
def within(where: str) -> Iterator[None]:
    """Name the place in the file in the RecipeErrors of a block."""
    try:
        yield
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None


def only(table: Table, allowed: tuple[str, ...], what: str) -> None:
    """RecipeError if the table has another key."""
    wrong = [key for key in table if key not in allowed]
    if wrong:
        raise RecipeError(f"{what} has no key {wrong[0]!r}; allowed are {', '.join(allowed)}")


def text_of(data: Table) -> str:
    """The TOML of the table of a recipe or schedule."""
    tables = {key: rows for key, rows in data.items() if key in ("rules", "phases") and rows}
    lines = [f"{_key(key)} = {_inline(part)}" for key, part in data.items() if key not in tables]
    for key, rows in tables.items():
        for row in rows:
            lines += ["", f"[[{key}]]", *(f"{_key(name)} = {_inline(part)}" for name, part in row.items())]
    return "\n".join(lines) + "\n"


def _inline(value: object) -> str:
    if is_table(value):
        return "{" + ", ".join(f"{_key(key)} = {_inline(part)}" for key, part in value.items()) + "}"
    if is_list(value):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _key(key: str) -> str:
    return key if BARE.fullmatch(key) else _text(key)


def _text(value: str) -> str:
    # TOML takes JSON's escapes but for pairs of surrogates, and wants DEL escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
