"""Recipes and schedules by name and from files: TOML or JSON, never code."""

import difflib
import functools
import json
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from duotone.errors import RecipeError
from duotone.recipes import reading
from duotone.recipes.builtin import BUILTIN
from duotone.recipes.recipe import Recipe
from duotone.recipes.schedule import Schedule


class _CycleError(RecipeError):
    """Its message names all the files already, so that none is put before it."""


def names() -> list[str]:
    """Built-in recipes, then the recipe files that ship."""
    return [*BUILTIN, *sorted(_shipped("files"))]


def schedule_names() -> list[str]:
    """The schedules that ship."""
    return sorted(_shipped("files/schedules"))


def load(name_or_path: str) -> Recipe:
    """The recipe of that name, or of that TOML or JSON file. Raises RecipeError where there is none or it is wrong."""
    return _as_recipe(load_any(name_or_path), name_or_path)


def load_schedule(name_or_path: str) -> Schedule:
    """The schedule of that name, or of that TOML or JSON file. Raises RecipeError where there is none."""
    found = load_any(name_or_path)
    if not isinstance(found, Schedule):
        raise RecipeError(f"{name_or_path} is a recipe, not a schedule: use duotone.recipes.load, or add [[phases]]")
    return found


def load_any(name_or_path: str) -> Recipe | Schedule:
    """The recipe or the schedule of that name or file."""
    return _load(name_or_path, Path(), ())


def from_dict(data: Any, *, where: str = "recipe", default_name: str = "rules") -> Recipe:
    """A recipe from its `to_dict` form: {"recipe": a built-in name, fields} or {"name", "rules": [...]}."""
    return _as_recipe(any_from_dict(data, where=where, default_name=default_name), where)


def any_from_dict(data: Any, *, where: str = "recipe", default_name: str = "rules") -> Recipe | Schedule:
    """A recipe or a schedule from its `to_dict` form."""
    return _read(data, where, default_name, Path(), ())


def _as_recipe(found: Recipe | Schedule, where: str) -> Recipe:
    if isinstance(found, Schedule):
        raise RecipeError(
            f"{where} is a schedule, not a recipe: use duotone.recipes.load_schedule, or duotone train --recipe"
        )
    return found


def _load(name_or_path: str, folder: Path, chain: tuple[str, ...]) -> Recipe | Schedule:
    """What `name_or_path` names, a path from `folder` on; `chain` are the files that led here."""
    if not isinstance(name_or_path, str | Path):
        raise RecipeError(f"a recipe is loaded by its name or the path of its file; got {name_or_path!r}")
    if name_or_path in BUILTIN:
        return BUILTIN[name_or_path]()
    shipped = {**_shipped("files"), **_shipped("files/schedules")}
    if name_or_path in shipped:
        return _read(tomllib.loads(shipped[name_or_path]), name_or_path, name_or_path, Path(), (*chain, name_or_path))
    path = Path(name_or_path)
    if path.suffix not in (".toml", ".json"):
        allowed = [*names(), *schedule_names()]
        near = difflib.get_close_matches(name_or_path, allowed, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise RecipeError(
            f"recipe {name_or_path!r} is unknown; {hint}allowed are {', '.join(allowed)}, or a .toml or .json file"
        )
    path = folder / path
    key = str(path.resolve())
    if key in chain:
        files = " -> ".join(Path(link).name for link in (*chain[chain.index(key) :], key))
        raise _CycleError(f"recipe files refer to each other in a cycle: {files}; let one of them name no other")
    return _read(_parse(path), str(path), path.stem, path.parent, (*chain, key))


def _read(data: Any, where: str, default_name: str, folder: Path, chain: tuple[str, ...]) -> Recipe | Schedule:
    def resolve(name_or_path: str) -> Recipe:
        return _as_recipe(_load(name_or_path, folder, chain), name_or_path)

    try:
        return reading.value(data, resolve, default_name)
    except _CycleError:
        raise
    except (RecipeError, TypeError) as error:
        raise RecipeError(f"{where}: {error}") from None


def _parse(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise RecipeError(f"recipe file {path} cannot be read: {reason}; name a .toml or .json file") from None
    try:
        return tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise RecipeError(f"recipe file {path} is not valid {path.suffix[1:].upper()}: {error}") from None


@functools.cache
def _shipped(folder: str) -> dict[str, str]:
    found = resources.files("duotone.recipes").joinpath(*folder.split("/"))
    return {Path(f.name).stem: f.read_text(encoding="utf-8") for f in found.iterdir() if f.name.endswith(".toml")}
