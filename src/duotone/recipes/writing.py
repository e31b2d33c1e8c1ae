"""A recipe or a schedule as the text of a TOML file."""

import json
import re

from duotone.recipes.limits import is_list, is_table
from duotone.recipes.recipe import Recipe
from duotone.recipes.schedule import Schedule

BARE = re.compile(r"[A-Za-z0-9_-]+")


def dumps(value: Recipe | Schedule) -> str:
    """TOML that `load` or `load_schedule` reads back; functions appear by name and are not read back."""
    data = value.to_dict()
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
