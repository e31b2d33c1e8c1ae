"""Tables of recipe files, the size of a file, and texts that fit one line."""

from typing import Any, TypeGuard

from duotone.errors import RecipeError

Table = dict[str, Any]
"""A table of a recipe file."""

FILE_BYTES = 2**20
MESSAGE = 1000


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
