"""Tables of a file to recipes and schedules: which keys there are, and what each may hold."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from duotone.errors import RecipeError, UserError
from duotone.recipes.builtin import BUILTIN
from duotone.recipes.custom import CustomRecipe
from duotone.recipes.limits import PHASES, RULES, check_number
from duotone.recipes.recipe import Recipe, with_new_names
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


def value(data: Any, resolve: Resolve, default_name: str) -> Recipe | Schedule:
    """What a table says: {"recipe": a built-in name, fields}, {"rules": [...]} or {"phases": [...]}."""
    if not isinstance(data, dict):
        raise RecipeError(f"a recipe is a table of keys; got {type(data).__name__}")
    return _schedule(data, resolve, default_name) if "phases" in data else recipe(data, resolve, default_name)


def recipe(data: dict[str, Any], resolve: Resolve, default_name: str) -> Recipe:
    """A recipe, not a schedule, from its table."""
    data = with_new_names(data)
    return _builtin(data, resolve) if "recipe" in data else _rules(data, resolve, default_name)


def _builtin(data: dict[str, Any], resolve: Resolve) -> Recipe:
    kind = data["recipe"]
    if beside := next((key for key in ("rules", "base", "delayed") if key in data), None):
        raise RecipeError(
            f"recipe and {beside} stand side by side; beside rules write base = {kind!r} instead of recipe"
        )
    if kind == CustomRecipe.kind:
        raise RecipeError("a recipe of a function cannot be read back: make the CustomRecipe in Python, or write rules")
    if not isinstance(kind, str) or kind not in BUILTIN:
        raise RecipeError(f"recipe {kind!r} is unknown; allowed are {', '.join(BUILTIN)}")
    given = {key: found for key, found in data.items() if key != "recipe"}
    _only(given, tuple(f.name for f in fields(BUILTIN[kind])), f"recipe {kind}")
    if "evaluation" in given:
        given["evaluation"] = _reference(given["evaluation"], resolve, "evaluation")
    return BUILTIN[kind](**given)


def _rules(data: dict[str, Any], resolve: Resolve, default_name: str) -> RuleRecipe:
    _only(data, HEAD_KEYS, "a recipe file")
    rows = data.get("rules", [] if "base" in data else None)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows) or not (rows or "base" in data):
        raise RecipeError("a recipe file needs [[rules]] (or recipe = a built-in name); add at least one rule")
    check_number("rules", len(rows), RULES)
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


def _rule(number: int, row: dict[str, Any]) -> Rule:
    _only(row, tuple(f.name for f in fields(Rule)), f"rule {number}")
    try:
        return Rule(**row)
    except RecipeError as error:
        raise RecipeError(f"rule {number}: {error}") from None


def _history(row: Any) -> History:
    if not isinstance(row, dict):
        raise RecipeError(f"delayed is {row!r}; give a table with {', '.join(DELAYED_KEYS)}")
    _only(row, DELAYED_KEYS, "[delayed]")
    if not isinstance(row.get("reduce_amax", True), bool):
        raise RecipeError(f"reduce_amax is {row['reduce_amax']!r}; allowed are true and false")
    try:
        return History(**row)
    except UserError as error:
        raise RecipeError(f"[delayed]: {error}") from None


def _schedule(data: dict[str, Any], resolve: Resolve, default_name: str) -> Schedule:
    _only(data, SCHEDULE_KEYS, "a schedule")
    rows = data["phases"]
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise RecipeError("a schedule needs [[phases]] with from and recipe; add at least one")
    check_number("phases", len(rows), PHASES)
    title = data.get("name", default_name)
    return Schedule(tuple(_phase(i, row, resolve) for i, row in enumerate(rows, 1)), data.get("steps"), title)


def _phase(number: int, row: dict[str, Any], resolve: Resolve) -> Phase:
    where = f"phase {number}"
    _only(row, PHASE_KEYS, where)
    missing = next((key for key in ("from", "recipe") if key not in row), None)
    if missing:
        raise RecipeError(f"{where} has no {missing}; give from = a step or a fraction, and recipe = a name or a file")
    found = _reference(row["recipe"], resolve, f"{where}: recipe")
    try:
        return Phase(found, row["from"], row.get("convert_parameters", False))
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None


def _reference(given: Any, resolve: Resolve, where: str) -> Recipe:
    """A recipe inside another one: by its name, by its file, or as a table."""
    if isinstance(given, str):
        return resolve(given)
    if not isinstance(given, dict) or "phases" in given:
        raise RecipeError(f"{where} is {given!r}; give the name of a recipe, a file, or a table of one")
    try:
        return recipe(given, resolve, "rules")
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None


def _only(given: dict[str, Any], allowed: tuple[str, ...], what: str) -> None:
    wrong = [key for key in given if key not in allowed]
    if wrong:
        raise RecipeError(f"{what} has no key {wrong[0]!r}; allowed are {', '.join(allowed)}")
