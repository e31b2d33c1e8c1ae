"""The content of an object that a user may subclass: all of its attributes, by value where they have one."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple, cast

from duotone.formats import Format
from duotone.tensor.history import History


class Uncompared(NamedTuple):
    """A value that is compared by identity, because its `==` may say too little.

    Who keeps it must keep the object alive, so that no other object gets its number.
    """

    number: int
    kind: type


class WithContent:
    """An object whose content tells whether another is alike: the `==` of a user's class may leave attributes out."""

    @property
    def content(self) -> Hashable:
        """A value that objects of one class share if all their attributes are equal, as they are now."""
        kind = type(self)
        if any("__slots__" in vars(base) for base in kind.__mro__):
            return Uncompared(id(self), kind)
        return kind, *((name, _word(value)) for name, value in sorted(vars(self).items()))


def _word(value: object) -> Hashable:
    """A value by its content as it is now, or by its identity."""
    kind = type(value)
    if isinstance(value, Format | History):
        return value
    if isinstance(value, WithContent):
        return value.content
    if isinstance(value, tuple) or kind is list:
        return kind, *map(_word, cast("Sequence[object]", value))
    if kind is dict:
        return kind, *((_word(key), _word(each)) for key, each in cast("dict[object, object]", value).items())
    return (kind, repr(value)) if kind in (bool, int, float, str) else Uncompared(id(value), kind)
