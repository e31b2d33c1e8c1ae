"""Recipes by name and from files: TOML or JSON, never code."""

import difflib
import json
import tomllib
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

from duotone.errors import RecipeError
from duotone.recipes.builtin import BUILTIN
from duotone.recipes.recipe import Recipe
from duotone.recipes.rules import Rule, RuleRecipe

HEAD_KEYS = ("name", "strict", "backward_override", "rules")


def names() -> list[str]:
    """Built-in recipes, then the recipe files that ship."""
    return [*BUILTIN, *sorted(_shipped())]


def load(name_or_path: str) -> Recipe:
    """The recipe of that name, or of that TOML or JSON file. Raises RecipeError where there is none or it is wrong."""
    if name_or_path in BUILTIN:
        return BUILTIN[name_or_path]()
    shipped = _shipped()
    if name_or_path in shipped:
        return from_dict(tomllib.loads(shipped[name_or_path]), where=name_or_path)
    path = Path(name_or_path)
    if path.suffix in (".toml", ".json"):
        return from_dict(_parse(path), where=str(path), default_name=path.stem)
    near = difflib.get_close_matches(name_or_path, names(), n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? " if near else ""
    raise RecipeError(
        f"recipe {name_or_path!r} is unknown; {hint}allowed are {', '.join(names())}, or a .toml or .json file"
    )


def from_dict(data: Any, *, where: str = "recipe", default_name: str = "rules") -> Recipe:
    """A recipe from its `to_dict` form: {"recipe": a built-in name, fields} or {"name", "rules": [...]}."""
    if not isinstance(data, dict):
        raise RecipeError(f"{where}: a recipe is a table of keys; got {type(data).__name__}")
    try:
        return _builtin(data) if "recipe" in data else _rules(data, default_name)
    except (RecipeError, TypeError) as error:
        raise RecipeError(f"{where}: {error}") from None


def _builtin(data: dict[str, Any]) -> Recipe:
    kind = data["recipe"]
    if kind not in BUILTIN:
        raise RecipeError(f"recipe {kind!r} is unknown; allowed are {', '.join(BUILTIN)}")
    given = {key: value for key, value in data.items() if key != "recipe"}
    _only(given, tuple(f.name for f in fields(BUILTIN[kind])), f"recipe {kind}")
    return BUILTIN[kind](**given)


def _rules(data: dict[str, Any], default_name: str) -> RuleRecipe:
    _only(data, HEAD_KEYS, "a recipe file")
    rows = data.get("rules")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise RecipeError("a recipe file needs [[rules]] (or recipe = a built-in name); add at least one rule")
    rules = []
    for i, row in enumerate(rows, 1):
        _only(row, tuple(f.name for f in fields(Rule)), f"rule {i}")
        wrong = [key for key, value in row.items() if not isinstance(value, str)]
        if wrong:
            raise RecipeError(f"rule {i}: {wrong[0]} is {row[wrong[0]]!r}; every field of a rule is a string")
        rules.append(Rule(**row))
    head = {key: data[key] for key in ("strict", "backward_override") if key in data}
    title = data.get("name", default_name)
    if not isinstance(title, str):
        raise RecipeError(f"name is {title!r}; it must be a string")
    return RuleRecipe(rules=tuple(rules), title=title, **head)


def _only(given: dict[str, Any], allowed: tuple[str, ...], what: str) -> None:
    wrong = [key for key in given if key not in allowed]
    if wrong:
        raise RecipeError(f"{what} has no key {wrong[0]!r}; allowed are {', '.join(allowed)}")


def _parse(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise RecipeError(f"recipe file {path} cannot be read: {reason}; name a .toml or .json file") from None
    try:
        return tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise RecipeError(f"recipe file {path} is not valid {path.suffix[1:].upper()}: {error}") from None


def _shipped() -> dict[str, str]:
    folder = resources.files("duotone.recipes") / "files"
    return {Path(f.name).stem: f.read_text(encoding="utf-8") for f in folder.iterdir() if f.name.endswith(".toml")}
