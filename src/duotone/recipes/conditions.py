"""Conditions of rules: patterns on names, the layer, counted from either end, and the sizes of the weight.

Patterns are globs and a part of Python's regular expressions. Python's own matcher may take exponential time, and a
recipe file can come from anywhere. An `Expression` follows all ways through its pattern at once (Thompson, "Regular
expression search algorithm", 1968), in time proportional to the name.
"""

import difflib
import functools
import operator
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase, translate
from importlib import import_module
from typing import Any

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


_compiler, _constants, _parser = (import_module(f"re.{name}") for name in ("_compiler", "_constants", "_parser"))

LARGEST = 2000
"""States of an expression: a name is compared with each of them at each of its characters."""

REMEMBERED = 8192
"""The most states in the moves that an expression remembers. A move leads from some states by one character."""

ONE, AT, SPLIT, END = "one character", "a position", "other states", "the end"
Node = tuple[object, Any]
"""A part of a pattern after Python's parser: an opcode of `_constants`, and a value of the opcode's type."""

CHARACTERS: tuple[object, ...] = (_constants.LITERAL, _constants.NOT_LITERAL, _constants.ANY, _constants.IN)
REPEATS: tuple[object, ...] = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)
AHEAD: tuple[object, ...] = (_constants.ASSERT, _constants.ASSERT_NOT)


@functools.lru_cache(maxsize=16384)
def glob(pattern: str) -> "re.Pattern[str]":
    """The glob as a regular expression. No star is tried twice, so its time is bounded."""
    return re.compile(translate(pattern))


@functools.lru_cache(maxsize=16384)
def expression(pattern: str) -> "Expression":
    """The regular expression. RecipeError if the text is none, or if its time has no bound."""
    return Expression(pattern)


class Expression:
    """`re.fullmatch` for characters, classes, groups, `|`, repeats, positions, and lookaheads at the very start.

    RecipeError if the pattern is no regular expression, or has more than LARGEST states with its repeats written out.
    It is also raised for back references, lookbehinds, other lookaheads, flags of a group, possessive and atomic parts.
    """

    def __init__(self, pattern: str) -> None:
        try:
            parsed = _parser.parse(pattern)
            nodes: list[Node] = list(parsed)
            self._conditions: list[tuple[_Automaton, bool]] = []
            while nodes and nodes[0][0] in AHEAD and nodes[0][1][0] > 0:
                kind, (_, condition) = nodes.pop(0)
                self._conditions.append((_Automaton(condition, parsed.state), kind is _constants.ASSERT))
            self._whole = _Automaton(nodes, parsed.state)
        except (re.error, OverflowError) as error:
            raise RecipeError(
                f"module_regex {pattern!r} is no regular expression: {error}; correct it, or use module"
            ) from None
        except RecursionError:
            raise RecipeError(f"module_regex {pattern[:40]!r}... is nested too deep: simplify it") from None
        except _RefusedError as error:
            raise RecipeError(f"module_regex {pattern!r} has {error}: leave that out, or write several rules") from None

    def matches(self, text: str) -> bool:
        """Whether the expression matches the whole text."""
        if not all(condition.run(text, whole=False) is expected for condition, expected in self._conditions):
            return False
        return self._whole.run(text, whole=True)


class _RefusedError(Exception):
    """A part of a regular expression whose time has no bound."""


class _Automaton:
    """States: what each waits for, the test of that, and the states after it. The first state is the end."""

    def __init__(self, nodes: Iterable[Node], parsed: object) -> None:
        self._parsed = parsed
        self._states: list[tuple[str, re.Pattern[str] | None, tuple[int, ...]]] = [(END, None, ())]
        self._start = self._sequence(nodes, 0)
        self._is_local = all(waits_for != AT for waits_for, _, _ in self._states)
        self._room = REMEMBERED
        self._moves: dict[tuple[frozenset[int], str], frozenset[int]] = {}

    def run(self, text: str, *, whole: bool) -> bool:
        """Whether the whole text matches or, if not `whole`, a part of it from the start on."""
        states = self._reachable([self._start], text, 0)
        for place in range(len(text)):
            if not states or (0 in states and not whole):
                break
            states = self._move(states, text, place)
        return 0 in states

    def _move(self, states: frozenset[int], text: str, place: int) -> frozenset[int]:
        """The states after the character at `place`. They are remembered, because names have much in common."""
        key = states, text[place]
        if key in self._moves:
            return self._moves[key]
        after: list[int] = []
        for state in states:
            waits_for, test, following = self._states[state]
            if waits_for == ONE and test is not None and test.match(text, place):
                after += following
        reached = self._reachable(after, text, place + 1)
        if self._is_local and len(reached) < self._room:
            self._room -= len(reached) + 1
            self._moves[key] = reached
        return reached

    def _reachable(self, states: list[int], text: str, place: int) -> frozenset[int]:
        """The states and those after them that wait for no character."""
        reached: set[int] = set()
        while states:
            state = states.pop()
            if state in reached:
                continue
            reached.add(state)
            waits_for, test, following = self._states[state]
            if waits_for == SPLIT or (waits_for == AT and test is not None and test.match(text, place)):
                states += following
        return frozenset(reached)

    def _add(self, waits_for: str, test: "re.Pattern[str] | None", *following: int) -> int:
        if len(self._states) == LARGEST:
            raise _RefusedError(f"more than {LARGEST} states with its repeats written out")
        self._states.append((waits_for, test, following))
        return len(self._states) - 1

    def _sequence(self, nodes: Iterable[Node], after: int) -> int:
        """The first state of nodes in a row that lead to the state `after`."""
        for kind, value in reversed(list(nodes)):
            after = self._node(kind, value, after)
        return after

    def _node(self, kind: object, value: Any, after: int) -> int:
        if kind in CHARACTERS:
            return self._add(ONE, self._test(kind, value), after)
        if kind is _constants.AT:
            return self._add(AT, self._test(kind, value), after)
        if kind is _constants.BRANCH:
            return self._add(SPLIT, None, *(self._sequence(branch, after) for branch in value[1]))
        if kind in REPEATS:
            least, most, body = value
            return self._repeat(least, most, body, after)
        if kind is _constants.SUBPATTERN and not value[1] and not value[2]:
            return self._sequence(value[3], after)
        if kind is _constants.FAILURE:
            return self._add(SPLIT, None)
        if kind in AHEAD:
            raise _RefusedError("a lookaround that is no lookahead at the start")
        named = "flags of a group" if kind is _constants.SUBPATTERN else str(kind).lower().replace("_", " ")
        raise _RefusedError(f"{named}, which Duotone does not match")

    def _repeat(self, least: int, most: int, body: Iterable[Node], after: int) -> int:
        if most is _constants.MAXREPEAT:
            start = self._add(SPLIT, None)
            self._states[start] = (SPLIT, None, (after, self._sequence(body, start)))
        else:
            start = self._copies(body, most - least, after, after)
        return self._copies(body, least, start)

    def _copies(self, body: Iterable[Node], count: int, after: int, way_out: int | None = None) -> int:
        """`count` times the body. With a `way_out`, each may be left out."""
        for _ in range(count):
            before = len(self._states)
            start = self._sequence(body, after)
            if len(self._states) == before:  # an empty body, however often
                return after
            after = start if way_out is None else self._add(SPLIT, None, start, way_out)
        return after

    def _test(self, kind: object, value: object) -> "re.Pattern[str]":
        return _compiler.compile(_parser.SubPattern(self._parsed, [(kind, value)]))
