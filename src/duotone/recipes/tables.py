"""Recipes and schedules as tables: which keys a table may have, which values, and its text as a TOML file."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields

from duotone.errors import RecipeError
from duotone.recipes.builtin import BUILTIN
from duotone.recipes.custom import CustomRecipe
from duotone.recipes.delayed import history
from duotone.recipes.limits import Table, is_list, is_table
from duotone.recipes.recipe import Recipe, RecipeLike, as_recipe
from duotone.recipes.rules import Rule, RuleRecipe
from duotone.recipes.schedule import Phase, Schedule
from duotone.tensor.history import History

COMMON_KEYS = tuple(f.name for f in fields(Recipe) if f.name != "evaluation")
HEAD_KEYS = ("name", *COMMON_KEYS, "evaluation", "base", "delayed", "rules")
SCHEDULE_KEYS = ("name", "steps", "phases")
PHASE_KEYS = ("from", "recipe", "convert_parameters")
DELAYED_KEYS = tuple(f.name for f in fields(History) if f.name != "scaling_factor_compute_algo")

Resolve = Callable[[str], Recipe]
"""The recipe that a file refers to by a name or by the path of another file."""


def read(data: object, resolve: Resolve, default_name: str) -> Recipe | Schedule:
    """The value of a table: {"recipe": a built-in name, fields}, {"rules": [...]} or {"phases": [...]}."""
    if not is_table(data):
        raise RecipeError(f"a recipe is a table of keys; got {type(data).__name__}")
    return _schedule(data, resolve, default_name) if "phases" in data else read_recipe(data, resolve, default_name)


def read_recipe(data: Table, resolve: Resolve, default_name: str) -> Recipe:
    """A recipe, not a schedule, from its table."""
    return _builtin(data, resolve) if "recipe" in data else _rules(data, resolve, default_name)


def _builtin(data: Table, resolve: Resolve) -> Recipe:
    kind = data["recipe"]
    if beside := next((key for key in ("rules", "base", "delayed") if key in data), None):
        raise RecipeError(
            f"recipe and {beside} stand side by side; beside rules write base = {kind!r} instead of recipe"
        )
    if kind == CustomRecipe.kind:
        raise RecipeError("a recipe of a function cannot be read back: make the CustomRecipe in Python, or write rules")
    if not isinstance(kind, str) or kind not in BUILTIN:
        raise RecipeError(f"recipe {kind!r} is unknown; allowed are {', '.join(BUILTIN)}")
    options = {key: value for key, value in data.items() if key != "recipe"}
    _only(options, tuple(f.name for f in fields(BUILTIN[kind])), f"recipe {kind}")
    if "evaluation" in options:
        options["evaluation"] = _reference(options["evaluation"], resolve, "evaluation")
    return BUILTIN[kind](**options)


def _rules(data: Table, resolve: Resolve, default_name: str) -> RuleRecipe:
    _only(data, HEAD_KEYS, "a recipe file")
    rows = data.get("rules", [] if "base" in data else None)
    if not is_list(rows) or not all(map(is_table, rows)) or not (rows or "base" in data):
        raise RecipeError("a recipe file needs [[rules]] (or recipe = a built-in name); add at least one rule")
    head = {key: data[key] for key in COMMON_KEYS if key in data}
    for key in ("base", "evaluation"):
        if key in data:
            head[key] = _reference(data[key], resolve, key)
    if "delayed" in data:
        head["history"] = _history(data["delayed"])
    title = data.get("name", default_name)
    if not isinstance(title, str):
        raise RecipeError(f"name is {title!r}; it must be a string")
    return RuleRecipe(rules=tuple(_rule(i, row) for i, row in enumerate(rows, 1)), title=title, **head)


def _rule(number: int, row: Table) -> Rule:
    _only(row, tuple(f.name for f in fields(Rule)), f"rule {number}")
    with _within(f"rule {number}"):
        return Rule(**row)


def _history(row: object) -> History:
    if not is_table(row):
        raise RecipeError(f"delayed is {row!r}; give a table with {', '.join(DELAYED_KEYS)}")
    _only(row, DELAYED_KEYS, "[delayed]")
    with _within("[delayed]"):
        return history(row)


def _schedule(data: Table, resolve: Resolve, default_name: str) -> Schedule:
    _only(data, SCHEDULE_KEYS, "a schedule")
    rows = data["phases"]
    if not is_list(rows) or not rows or not all(map(is_table, rows)):
        raise RecipeError("a schedule needs [[phases]] with from and recipe; add at least one")
    title = data.get("name", default_name)
    return Schedule(tuple(_phase(i, row, resolve) for i, row in enumerate(rows, 1)), data.get("steps"), title)


def _phase(number: int, row: Table, resolve: Resolve) -> Phase:
    where = f"phase {number}"
    _only(row, PHASE_KEYS, where)
    missing = next((key for key in ("from", "recipe") if key not in row), None)
    if missing:
        raise RecipeError(f"{where} has no {missing}; give from = a step or a fraction, and recipe = a name or a file")
    recipe = _reference(row["recipe"], resolve, f"{where}: recipe")
    with _within(where):
        return Phase(recipe, row["from"], row.get("convert_parameters", False))


def _reference(named: object, resolve: Resolve, where: str) -> Recipe:
    """A recipe inside another one: by its name, by its file, or as a table."""
    if isinstance(named, str):
        return resolve(named)
    if not is_table(named) or "phases" in named:
        raise RecipeError(f"{where} is {named!r}; give the name of a recipe, a file, or a table of one")
    with _within(where):
        return read_recipe(named, resolve, "rules")


@contextmanager
def _within(where: str) -> Iterator[None]:
    """Name the place in the file in the RecipeErrors of a block."""
    try:
        yield
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None


def _only(table: Table, allowed: tuple[str, ...], what: str) -> None:
    """RecipeError if the table has another key."""
    wrong = [key for key in table if key not in allowed]
    if wrong:
        raise RecipeError(f"{what} has no key {wrong[0]!r}; allowed are {', '.join(allowed)}")


BARE = re.compile(r"[A-Za-z0-9_-]+")


def dumps(value: RecipeLike | Schedule) -> str:
    """TOML that `load` or `load_schedule` reads back; functions appear by name and are not read back."""
    return text_of((value if isinstance(value, Schedule) else as_recipe("dumps", value)).to_dict())


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
