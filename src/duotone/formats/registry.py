"""Formats by name: append-only. `catalog.py` holds the rows that ship."""

import difflib
from typing import TYPE_CHECKING

from duotone.errors import RecipeError

if TYPE_CHECKING:
    from duotone.formats.format import Format

_FORMATS: "dict[str, Format]" = {}


def register(fmt: "Format") -> "Format":
    """Add a format under its name; a name is never given twice."""
    if fmt.name in _FORMATS:
        raise RecipeError(f"format {fmt.name!r} is registered already; choose another name")
    _FORMATS[fmt.name] = fmt
    return fmt


def get(name: str) -> "Format":
    """The format of that name. Raises RecipeError where there is none."""
    if isinstance(name, str) and name in _FORMATS:
        return _FORMATS[name]
    near = ", ".join(difflib.get_close_matches(str(name), _FORMATS, n=3, cutoff=0.4))
    hint = f"did you mean {near}? " if near else ""
    raise RecipeError(f"format {name!r} is unknown; {hint}`duotone formats` lists all")


def names() -> list[str]:
    """All registered names, in order of registration."""
    return list(_FORMATS)
