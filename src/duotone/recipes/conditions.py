"""Conditions of rules: patterns on names, the layer, counted from either end, and the sizes of the weight."""

import difflib
import functools
import operator
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase, translate
from importlib import import_module
from typing import Any, cast

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
    """RecipeError if a glob is almost a module type of Duotone. A warning if it matches no module type."""
    types = tuple(TENSORS_OF_MODULES)
    if any(fnmatchcase(kind, pattern) for kind in (*types, "")):  # "" for roles without a type
        return
    message = f"module_type {pattern!r} matches no module of Duotone, whose types are {', '.join(types)}"
    near = difflib.get_close_matches(pattern.lower(), types, n=1)
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
        place = int(match["one"])
        return index == (place if place >= 0 else total + place)
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


LONGEST = 200
"""The most characters of a regular expression."""

_parser: Any = import_module("re._parser")
"""Private, and nothing else tells the parts of an expression. It stands here because only this file asks it."""

REPEATS = (_parser.MAX_REPEAT, _parser.MIN_REPEAT, _parser.POSSESSIVE_REPEAT)


@functools.lru_cache(maxsize=16384)
def glob(pattern: str) -> "re.Pattern[str]":
    """The glob as a regular expression. No star is tried twice, so its time is bounded."""
    return re.compile(translate(pattern))


@functools.lru_cache(maxsize=16384)
def expression(pattern: str) -> "re.Pattern[str]":
    """Compile a regular expression. RecipeError if it is none or too long, or repeats a part that repeats.

    The time of such a repeat may double with each character of a name. Other expressions may be slow, too: Python tries
    all ways through alternatives and optional parts.
    """
    if len(pattern) > LONGEST:
        raise RecipeError(
            f"module_regex {pattern[:40]!r}... has {len(pattern)} characters; give at most {LONGEST}, or several rules"
        )
    try:
        compiled, parts = re.compile(pattern), _parser.parse(pattern)
    except (re.error, OverflowError) as error:
        raise RecipeError(
            f"module_regex {pattern!r} is no regular expression: {error}; correct it, or use module"
        ) from None
    if _has_nested_repeat(parts):
        raise RecipeError(
            f"module_regex {pattern!r} has a repeat inside of a repeat, which may take for ever: leave one of them "
            "out, or write several rules"
        )
    return compiled


def _has_nested_repeat(parts: Any, *, is_repeated: bool = False) -> bool:
    """Whether parts of an expression repeat inside of a repeat. A part that may only be left out repeats nothing."""
    for kind, value in parts:
        repeats = any(kind is each for each in REPEATS)
        if repeats and is_repeated:
            return True
        inside = is_repeated or (repeats and value[1] > 1)
        if any(_has_nested_repeat(inner, is_repeated=inside) for inner in _inner(value)):
            return True
    return False


def _inner(value: Any) -> Iterator[Any]:
    """The sequences of parts in the value of a part: a group has one, alternatives have several."""
    if isinstance(value, _parser.SubPattern):
        yield value
    elif isinstance(value, tuple | list):
        for each in cast("list[Any]", value):
            yield from _inner(each)
