"""How large a recipe may be, so that no file is slow or impossible to read, plan or print."""

import re
from typing import Any, TypeGuard

from duotone.errors import RecipeError

Table = dict[str, Any]
"""A table of a recipe file."""


def is_table(value: object) -> TypeGuard[Table]:
    """Whether a value of a file is a table, whose keys are text in TOML and JSON."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Whether a value is a list, of anything."""
    return isinstance(value, list)


FILE_BYTES = 2**20
TEXT = 1024
"""The most characters of one text."""

DEPTH = 32
"""The deepest nesting of tables and lists."""

BASES = 16
"""The longest chain of recipes, each the base of the one before, and of files that refer to each other."""

RULES, PHASES = 4096, 1024
INTEGER = 2**63 - 1
TOO_LONG = "has more than 18 digits; give a smaller one"
PRINTABLE = 10**4000
"""Python prints no integer of more than 4300 digits, so no message could show it."""

LONG_NUMBER = re.compile(r"[0-9_]{4300}")
"""Python reads no integer from these texts."""

MESSAGE = 1000

PART = r"""(?:[A-Za-z0-9_-]+|"(?:\\.|[^"\\\n])*"|'[^'\n]*')"""
DOTTED = re.compile(rf"(?:\.[ \t]*{PART}[ \t]*){{{DEPTH}}}")
"""A key of too many parts: the time of the TOML reader grows with the cube of their number."""


def check_text(field: str, text: str) -> None:
    """RecipeError unless `text` can be written to a file and read in a message."""
    if len(text) > TEXT:
        raise RecipeError(f"{field} has {len(text)} characters; give at most {TEXT}")
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise RecipeError(f"{field} is {text[:80]!r}, which holds NUL or half a surrogate pair; leave that out")


def check_title(title: object) -> None:
    """RecipeError unless `title` is one line that tables and files can show."""
    if not isinstance(title, str):
        raise RecipeError(f"title is {title!r}; it must be a string")
    check_text("title", title)
    if not title.isprintable():
        raise RecipeError(f"title is {title[:80]!r}; it must be one line of printable text")


def check_number(field: str, count: int, most: int) -> None:
    """RecipeError if `count` is above `most`."""
    if count > most:
        raise RecipeError(f"{count} {field} are more than a recipe may have; give at most {most}")


def check_integer(field: str, value: object, most: int = INTEGER) -> None:
    """RecipeError for an integer beyond `most`."""
    if isinstance(value, int) and not -most <= value <= most:
        raise RecipeError(f"{field} {TOO_LONG}")


def check_table(data: object, depth: int = DEPTH) -> None:
    """RecipeError if a value of a file is nested too deep, too long, not printable, or too large a number."""
    if is_table(data) or is_list(data):
        if depth == 0:
            raise RecipeError(f"tables are more than {DEPTH} deep; let a file name another one instead")
        for key, value in data.items() if is_table(data) else enumerate(data):
            if isinstance(key, str):
                check_text("a key", key)
            check_table(value, depth - 1)
    elif isinstance(data, str):
        check_text("a text", data)
    else:
        check_integer("a number", data)


def one_line(text: str) -> str:
    """`text` as one printable line. A long text loses its middle."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return shown if len(shown) <= MESSAGE else f"{shown[: MESSAGE // 2]} ... {shown[-MESSAGE // 2 :]}"
