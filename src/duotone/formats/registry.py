"""Formats by name: append-only. `catalog.py` holds the rows that ship."""

import difflib
import hashlib

import torch

from duotone.errors import RecipeError
from duotone.formats.format import Format

VERSION = 1
"""To be raised if the bits of a format change: graphs that torch keeps on disk then count no more."""
_FORMATS: dict[str, Format] = {}
_VARIANTS: dict[str, Format] = {}


def register(fmt: Format) -> Format:
    """Add a format under its name. RecipeError if the name is taken."""
    if fmt.name in _FORMATS or fmt.name in _VARIANTS:
        raise RecipeError(f"format {fmt.name!r} is registered already; choose another name")
    _FORMATS[fmt.name] = _marked(fmt)
    return fmt


def get(name: str) -> Format:
    """The format of that name. RecipeError if no format has it.

    "<name>_eps<value>" is the format <name>, with fp32 scales, in which an amax counts as at least <value>.
    """
    if isinstance(name, str) and name in _FORMATS:
        return _FORMATS[name]
    stem, floored, value = str(name).rpartition("_eps")
    if floored and stem in _FORMATS:
        return _variant(stem, value, name)
    near = ", ".join(difflib.get_close_matches(str(name).lower(), _FORMATS, n=3, cutoff=0.5))
    hint = f"did you mean {near}? " if near else ""
    raise RecipeError(f"format {name!r} is unknown; {hint}identity is high precision, and `duotone formats` lists all")


def names() -> list[str]:
    """All registered names, in order of registration."""
    return list(_FORMATS)


def with_floor(name: str, epsilon: float) -> str:
    """The name of the format in which an amax counts as at least `epsilon`; the same name for 0."""
    return f"{name}_eps{epsilon!r}" if epsilon else name


def _variant(stem: str, value: str, name: str) -> Format:
    if name not in _VARIANTS:
        try:
            epsilon = float(value)
        except ValueError:
            epsilon = -1.0
        if not 0.0 < epsilon <= torch.finfo(torch.float32).max:
            raise RecipeError(
                f"format {name!r}: the amax floor {value!r} is no positive number of fp32; write {stem}_eps1e-12"
            )
        _VARIANTS[name] = _marked(_FORMATS[stem].with_epsilon(epsilon, name))
    return _VARIANTS[name]


def _marked(fmt: Format) -> Format:
    """The format, which knows now that `get` finds it."""
    fields = [fmt, *vars(fmt).values()]
    is_ours = all(type(each).__module__.split(".")[0] in ("duotone", "torch", "builtins") for each in fields)
    digest = hashlib.sha256(repr((VERSION, type(fmt), fields[1:])).encode()).hexdigest()[:16]
    object.__setattr__(fmt, "node_name", f"{fmt.name}@{digest}" if is_ours else "")  # formats are frozen
    object.__setattr__(fmt, "is_registered", True)
    return fmt
