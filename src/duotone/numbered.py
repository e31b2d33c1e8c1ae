"""Numbered: living objects by a number that a compiled graph or a custom op can hold as a constant."""

import itertools
import weakref
from typing import TypeVar

T = TypeVar("T")


class Numbered(weakref.WeakValueDictionary[str, T]):
    """Objects by their number, as long as they live. A number is never used twice."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)

    def add(self, thing: T) -> str:
        """A new number for `thing`."""
        number = str(next(self._numbers))
        self[number] = thing
        return number
