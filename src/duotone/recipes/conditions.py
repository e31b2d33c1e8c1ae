"""Conditions of rules besides names: the layer, counted from either end, and the sizes of the weight."""

import difflib
import operator
import re
import sys
import warnings
from collections.abc import Callable
from fnmatch import fnmatchcase

from duotone.errors import RecipeError
from duotone.recipes.roles import TENSORS_OF_MODULES

LAYER = re.compile(r"(?P<one>-?[0-9]{1,9})|(?P<start>-?[0-9]{1,9})?:(?P<stop>-?[0-9]{1,9})?")
SIZE = re.compile(r"(>=|<=|==|!=|>|<|%)\s*([0-9]{1,18})")
COMPARE: dict[str, Callable[[int, int], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    "%": lambda size, step: size % step == 0,
}


def check_module_type(pattern: str) -> None:
    """RecipeError if a glob is nearly a module type of Duotone; a warning if it matches none."""
    known = tuple(TENSORS_OF_MODULES)
    if any(fnmatchcase(kind, pattern) for kind in (*known, "")):  # "" for roles without a type
        return
    message = f"module_type {pattern!r} matches no module of Duotone, whose types are {', '.join(known)}"
    near = difflib.get_close_matches(pattern.lower(), known, n=1)
    if near:
        raise RecipeError(f"{message}; did you mean {near[0]!r}?")
    warnings.warn(f"{message}: such a rule is for roles of your own", stacklevel=6)


def check_layer(layer: object) -> None:
    """RecipeError unless `layer` is an integer, or text such as "0", "-1", "0:2" or "-2:"."""
    if isinstance(layer, int) and not isinstance(layer, bool) and abs(layer) < 10**9:
        return
    if not isinstance(layer, str) or not LAYER.fullmatch(layer):
        raise RecipeError(f"layer is {layer!r}; give an index or a range of them, such as 0, '-1', '0:2' or '-2:'")


def is_layer(layer: int | str, index: int | None, count: int | None) -> bool:
    """Whether `layer` contains the module at `index` of a stack of `count`. False if the index is unknown."""
    if index is None:
        return False
    match = LAYER.fullmatch(str(layer))
    assert match is not None
    total = sys.maxsize if count is None else count
    if match["one"] is not None:
        wanted = int(match["one"])
        return index == (wanted if wanted >= 0 else total + wanted)
    start, stop = (int(match[end]) if match[end] else None for end in ("start", "stop"))
    return index in range(*slice(start, stop).indices(total))


def check_size(field: str, condition: object) -> None:
    """RecipeError unless `condition` is text such as ">=4096", "<1024", "==4096" or "%32"."""
    match = SIZE.fullmatch(condition) if isinstance(condition, str) else None
    if match is None or (match[1] == "%" and int(match[2]) == 0):
        raise RecipeError(
            f"{field} is {condition!r}; give a comparison such as '>=4096', '<1024' or '==4096', or '%32' for multiples"
        )


def is_size(condition: str, size: int) -> bool:
    """Whether a size meets the condition."""
    match = SIZE.fullmatch(condition)
    assert match is not None
    return COMPARE[match[1]](size, int(match[2]))
