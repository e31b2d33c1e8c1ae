"""What traces take as a constant or leave alone: objects by a number or a name, and functions."""

import inspect
import itertools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])


class Numbered(weakref.WeakValueDictionary[str, T]):
    """Objects by their number, as long as they live. A number is never used twice."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)

    def add(self, value: T) -> str:
        """A new number for `value`."""
        number = str(next(self._numbers))
        self[number] = value
        return number


class ByName:
    """Values as attributes. Guards of a graph read them, and a trace sees those that are added while it runs.

    Of a dictionary, a trace only knows the entries at its first look.
    """


def attribute_name(words: str) -> str:
    """`words` without the characters that Dynamo takes in no name of an attribute. Other words give another name."""
    return words.replace("~", "~~").replace(".", "~d").replace(":", "~c")


class Holder(Protocol):
    """Holds a value as `holder.__annotations__["value"]`."""

    __annotations__: dict[str, Any]


def without_guards(value: object) -> Holder:
    """A holder whose value a trace reads without guards. So the value never changes.

    It is a function: Dynamo compares no annotations of functions at later calls, but all that a trace reads of other
    objects.
    """

    def holder() -> None:
        """Not called."""

    holder.__annotations__ = {"value": value}
    return holder


def with_guards(value: object) -> Holder:
    """A holder whose value guards compare at each call."""
    return SimpleNamespace(__annotations__={"value": value})


def constant_in_traces(function: F) -> F:
    """Let a trace call a function and treat its result as a constant.

    torch.compiler.assume_constant_result does so too, but it imports the compiler. Behind a break of a graph, Dynamo
    would compile such a function as a frame of its own, and write its own versions of the objects that this changes.
    """
    function._dynamo_marked_constant = True
    never_compiled(inspect.unwrap(function))
    return function


def never_compiled(function: F) -> F:
    """Never compile this function or its callees, also if autograd calls it within compiled code."""
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function
