"""Recipes by name, from tables and from files: TOML or JSON, never code."""

import difflib
import functools
import json
import os
import stat
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from duotone.errors import RecipeError
from duotone.recipes.builtin import BUILTIN, RuleRecipe
from duotone.recipes.delayed import history
from duotone.recipes.recipe import Recipe
from duotone.recipes.rules import Rule
from duotone.recipes.tables import CUSTOM, FILE_BYTES, Table, is_list, is_table, one_line, only, within
from duotone.tensor.history import History

COMMON_KEYS = tuple(f.name for f in fields(Recipe) if f.name != "evaluation")
HEAD_KEYS = ("name", *COMMON_KEYS, "evaluation", "base", "delayed", "rules")
DELAYED_KEYS = tuple(f.name for f in fields(History) if f.name != "scaling_factor_compute_algo")

T = TypeVar("T")
Resolve = Callable[[str], Recipe]
"""The recipe that a file refers to by a name or by the path of another file."""
Build = Callable[[Any, Resolve, str], T]
"""What makes a recipe or a schedule of a table. The text is the name that it has without its own."""


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
    return Source().find(name_or_path).recipe


def from_dict(data: object, *, where: str = "recipe", default_name: str = "rules") -> Recipe:
    """A recipe from its `to_dict` form: {"recipe": a built-in name, fields} or {"name", "rules": [...]}."""
    return Source(data, where, default_name).recipe


@dataclass(frozen=True)
class Source:
    """A table of a recipe or schedule: where it was read, and what a load reads on the way."""

    data: Any = None
    where: str = ""
    """What messages call the table."""
    title: str = ""
    """The name of the recipe or schedule, unless the table has one."""
    folder: Path = Path()
    """Where files lie that the table names."""
    chain: tuple[str, ...] = ()
    """The files that led to the table, its own last."""
    files: "dict[str, Source]" = field(default_factory=lambda: {})
    """The files that one load has read. Each is read once, even if several others refer to it."""

    @property
    def is_schedule(self) -> bool:
        """Whether the table describes a schedule."""
        return is_table(self.data) and "phases" in self.data

    @functools.cached_property
    def recipe(self) -> Recipe:
        """The recipe of the table. RecipeError if it is that of a schedule, or wrong."""
        if self.is_schedule:
            remedy = "use duotone.recipes.load_schedule, or duotone train --recipe"
            raise RecipeError(f"{self.where} is a schedule, not a recipe: {remedy}")
        return self.read(_recipe)

    def read(self, build: Build[T]) -> T:
        """What `build` makes of the table. RecipeError, which names the table, if it is wrong."""
        try:
            return build(self.data, lambda named: self.find(named).recipe, self.title)
        except _ReferenceError:
            raise
        except RecursionError:
            raise _ReferenceError("recipes are nested too deep, in tables or over files; merge some of them") from None
        except (ValueError, TypeError) as error:  # a ValueError of Python for a number that it does not print
            raise RecipeError(one_line(f"{self.where}: {error}")) from None

    def find(self, name_or_path: str) -> "Source":
        """The table of a name, or of a path relative to `folder`. RecipeError if there is none."""
        if not isinstance(name_or_path, str | Path):
            raise RecipeError(f"a recipe is loaded by its name or the path of its file; got {name_or_path!r}")
        tables = {name: {"recipe": name} for name in BUILTIN} | _shipped("files") | _shipped("files/schedules")
        if name_or_path in tables:
            chain = (*self.chain, name_or_path)
            return Source(tables[name_or_path], name_or_path, name_or_path, Path(), chain, self.files)
        path = self.folder / name_or_path
        if path.suffix not in (".toml", ".json"):
            raise _unknown(str(name_or_path), path)
        content = _content(path)
        key = str(path.resolve())
        if key in self.chain:
            files = " -> ".join(Path(link).name for link in (*self.chain[self.chain.index(key) :], key))
            raise _ReferenceError(
                f"recipe files refer to each other in a cycle: {one_line(files)}; let one of them name no other"
            )
        if key not in self.files:
            title, chain = one_line(os.fsencode(path.stem).decode(errors="replace")), (*self.chain, key)
            self.files[key] = Source(_parse(path, content), str(path), title, path.parent, chain, self.files)
        return self.files[key]


def _recipe(data: object, resolve: Resolve, default_name: str) -> Recipe:
    """{"recipe": a built-in name, fields} or {"rules": [...]}."""
    if not is_table(data):
        raise RecipeError(f"a recipe is a table of keys; got {type(data).__name__}")
    return _builtin(data, resolve) if "recipe" in data else _rules(data, resolve, default_name)


def _builtin(data: Table, resolve: Resolve) -> Recipe:
    kind = data["recipe"]
    if beside := next((key for key in ("rules", "base", "delayed") if key in data), None):
        raise RecipeError(
            f"recipe and {beside} stand side by side; beside rules write base = {kind!r} instead of recipe"
        )
    if kind == CUSTOM:
        raise RecipeError("a recipe of a function cannot be read back: make the CustomRecipe in Python, or write rules")
    if not isinstance(kind, str) or kind not in BUILTIN:
        raise RecipeError(f"recipe {kind!r} is unknown; allowed are {', '.join(BUILTIN)}")
    options = {key: value for key, value in data.items() if key != "recipe"}
    only(options, tuple(f.name for f in fields(BUILTIN[kind])), f"recipe {kind}")
    return BUILTIN[kind](**options | _references(options, resolve))


def _rules(data: Table, resolve: Resolve, default_name: str) -> RuleRecipe:
    only(data, HEAD_KEYS, "a recipe file")
    rows = data.get("rules", [] if "base" in data else None)
    if not is_list(rows) or not all(map(is_table, rows)) or not (rows or "base" in data):
        raise RecipeError("a recipe file needs [[rules]] (or recipe = a built-in name); add at least one rule")
    head = {key: data[key] for key in COMMON_KEYS if key in data} | _references(data, resolve)
    if "delayed" in data:
        head["history"] = _history(data["delayed"])
    title = data.get("name", default_name)
    if not isinstance(title, str):
        raise RecipeError(f"name is {title!r}; it must be a string")
    return RuleRecipe(rules=tuple(_rule(i, row) for i, row in enumerate(rows, 1)), title=title, **head)


def _rule(number: int, row: Table) -> Rule:
    only(row, tuple(f.name for f in fields(Rule)), f"rule {number}")
    with within(f"rule {number}"):
        return Rule(**row)


def _history(row: object) -> History:
    if not is_table(row):
        raise RecipeError(f"delayed is {row!r}; give a table with {', '.join(DELAYED_KEYS)}")
    only(row, DELAYED_KEYS, "[delayed]")
    with within("[delayed]"):
        return history(row)


def _references(data: Table, resolve: Resolve) -> Table:
    """The recipes that the table of another one names."""
    return {key: reference(data[key], resolve, key) for key in ("base", "evaluation") if key in data}


def reference(named: object, resolve: Resolve, where: str) -> Recipe:
    """A recipe inside another one: by its name, by its file, or as a table."""
    if isinstance(named, str):
        return resolve(named)
    if not is_table(named) or "phases" in named:
        raise RecipeError(f"{where} is {named!r}; give the name of a recipe, a file, or a table of one")
    with within(where):
        return _recipe(named, resolve, "rules")


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
        return json.loads(text, object_pairs_hook=_without_twins) if kind == "JSON" else tomllib.loads(text)
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
def _shipped(folder: str) -> dict[str, Table]:
    files = resources.files("duotone.recipes").joinpath(*folder.split("/"))
    return {Path(f.name).stem: tomllib.loads(f.read_text("utf-8")) for f in files.iterdir() if f.name.endswith(".toml")}
