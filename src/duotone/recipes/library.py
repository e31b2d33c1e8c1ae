"""Recipes and schedules by name and from files: TOML or JSON, never code."""

import difflib
import functools
import json
import os
import stat
import tomllib
from importlib import resources
from pathlib import Path

from duotone.errors import RecipeError
from duotone.recipes import tables
from duotone.recipes.builtin import BUILTIN
from duotone.recipes.limits import FILE_BYTES, Table, one_line
from duotone.recipes.recipe import Recipe
from duotone.recipes.schedule import Schedule


class _ReferenceError(RecipeError):
    """Recipes refer to each other in a cycle or too deep. The message names none of their files first."""


def names() -> list[str]:
    """Built-in recipes, then the recipe files that ship."""
    return [*BUILTIN, *sorted(_shipped("files"))]


def schedule_names() -> list[str]:
    """The schedules that ship."""
    return sorted(_shipped("files/schedules"))


def load(name_or_path: str) -> Recipe:
    """The recipe of that name, or of that TOML or JSON file. RecipeError if there is none, or if it is wrong."""
    return _as_recipe(load_any(name_or_path), name_or_path)


def load_schedule(name_or_path: str) -> Schedule:
    """The schedule of that name, or of that TOML or JSON file. RecipeError if there is none, or if it is wrong."""
    schedule = load_any(name_or_path)
    if not isinstance(schedule, Schedule):
        raise RecipeError(f"{name_or_path} is a recipe, not a schedule: use duotone.recipes.load, or add [[phases]]")
    return schedule


def load_any(name_or_path: str) -> Recipe | Schedule:
    """The recipe or the schedule of that name or file."""
    return _Loading().load(name_or_path, Path(), ())


def from_dict(data: object, *, where: str = "recipe", default_name: str = "rules") -> Recipe:
    """A recipe from its `to_dict` form: {"recipe": a built-in name, fields} or {"name", "rules": [...]}."""
    return _as_recipe(any_from_dict(data, where=where, default_name=default_name), where)


def any_from_dict(data: object, *, where: str = "recipe", default_name: str = "rules") -> Recipe | Schedule:
    """A recipe or a schedule from its `to_dict` form."""
    return _Loading().read(data, where, default_name, Path(), ())


def _as_recipe(value: Recipe | Schedule, where: str) -> Recipe:
    if isinstance(value, Schedule):
        raise RecipeError(
            f"{where} is a schedule, not a recipe: use duotone.recipes.load_schedule, or duotone train --recipe"
        )
    return value


class _Loading:
    """One load. A file is read once, even if several others refer to it."""

    def __init__(self) -> None:
        self._files: dict[str, Recipe | Schedule] = {}

    def load(self, name_or_path: str, folder: Path, chain: tuple[str, ...]) -> Recipe | Schedule:
        """The value of a name, or of a path relative to `folder`. `chain` are the files that refer to it."""
        if not isinstance(name_or_path, str | Path):
            raise RecipeError(f"a recipe is loaded by its name or the path of its file; got {name_or_path!r}")
        if name_or_path in BUILTIN:
            return BUILTIN[name_or_path]()
        shipped = {**_shipped("files"), **_shipped("files/schedules")}
        if name_or_path in shipped:
            text = shipped[name_or_path]
            return self.read(tomllib.loads(text), name_or_path, name_or_path, Path(), (*chain, name_or_path))
        path = folder / name_or_path
        if path.suffix not in (".toml", ".json"):
            raise _unknown(str(name_or_path), path)
        content = _content(path)
        key = str(path.resolve())
        if key in chain:
            files = " -> ".join(Path(link).name for link in (*chain[chain.index(key) :], key))
            raise _ReferenceError(
                f"recipe files refer to each other in a cycle: {one_line(files)}; let one of them name no other"
            )
        if key not in self._files:
            data = _parse(path, content)
            title = one_line(os.fsencode(path.stem).decode(errors="replace"))
            self._files[key] = self.read(data, str(path), title, path.parent, (*chain, key))
        return self._files[key]

    def read(
        self, data: object, where: str, default_name: str, folder: Path, chain: tuple[str, ...]
    ) -> Recipe | Schedule:
        """The recipe or schedule of a table, which messages call `where`."""

        def resolve(name_or_path: str) -> Recipe:
            return _as_recipe(self.load(name_or_path, folder, chain), name_or_path)

        try:
            return tables.read(data, resolve, default_name)
        except _ReferenceError:
            raise
        except RecursionError:
            raise _ReferenceError("recipes are nested too deep, in tables or over files; merge some of them") from None
        except (ValueError, TypeError) as error:  # a ValueError of Python for a number that it does not print
            raise RecipeError(one_line(f"{where}: {error}")) from None


def _unknown(name: str, path: Path) -> RecipeError:
    if path.suffix in (".yaml", ".yml") or os.path.exists(path):
        return RecipeError(one_line(f"recipe file {path} is neither .toml nor .json: write it as one of these"))
    allowed = [*names(), *schedule_names()]
    begun = [each for each in allowed if each.startswith(name[:80].lower())]
    near = begun or difflib.get_close_matches(name[:80].lower(), allowed, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    return RecipeError(
        f"recipe {name[:80]!r} is unknown; {hint}allowed are {', '.join(allowed)}, or a .toml or .json file"
    )


def _content(path: Path) -> bytes:
    """The bytes of a recipe file. RecipeError if it cannot be read or is too large for a recipe."""
    try:
        mode = path.stat().st_mode
        reason = "it is a directory" if stat.S_ISDIR(mode) else "" if stat.S_ISREG(mode) else "it is no regular file"
        if not reason:
            with path.open("rb") as file:
                content = file.read(FILE_BYTES + 1)
            if len(content) <= FILE_BYTES:
                return content
            reason = f"it has more than {FILE_BYTES} bytes"
    except (OSError, ValueError) as error:  # a ValueError if the path holds NUL
        reason = getattr(error, "strerror", None) or str(error)
    raise RecipeError(one_line(f"recipe file {path} cannot be read: {reason}; name a .toml or .json file"))


def _parse(path: Path, content: bytes) -> object:
    kind = path.suffix[1:].upper()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        reason = "it is not UTF-8 text"
        raise RecipeError(one_line(f"recipe file {path} cannot be read: {reason}; save it as UTF-8")) from None
    try:
        if kind == "JSON":
            return json.loads(text, object_pairs_hook=_without_twins)
        return tomllib.loads(text)
    except RecursionError:
        reason = "it is nested too deep"
    except ValueError as error:
        reason = str(error)
    raise RecipeError(one_line(f"recipe file {path} is not valid {kind}: {reason}"))


def _without_twins(pairs: list[tuple[str, object]]) -> Table:
    """A table of JSON. ValueError if a key comes twice, like in TOML."""
    table: Table = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"the key {key!r} comes twice")
        table[key] = value
    return table


@functools.cache
def _shipped(folder: str) -> dict[str, str]:
    files = resources.files("duotone.recipes").joinpath(*folder.split("/"))
    return {Path(f.name).stem: f.read_text(encoding="utf-8") for f in files.iterdir() if f.name.endswith(".toml")}
