"""What recipes answer for the slots of modules, and names that equal answers and equal contents share in graphs."""

import itertools
import warnings
import weakref
from collections.abc import Hashable, Iterable, Mapping

from duotone.tensor.content import Uncompared
from duotone.tensor.quantizer import Quantizer


class Answers(dict[str, Quantizer]):
    """What a recipe gave each slot of a module. Equal answers are one object, as long as a module has them."""

    name: str
    """A name that equal answers share. Later ones share it too if all are fixed."""

    likeness: Hashable
    """The same for answers that differ only in objects whose values are not compared."""


_CONTENTS: dict[Hashable, str] = {}
"""Names of contents. They stay, so that a later model of the same kind finds the graphs of an earlier one."""

_ANSWERS: "weakref.WeakValueDictionary[Hashable, Answers]" = weakref.WeakValueDictionary()
_ANSWER_NUMBERS = itertools.count(1)


def content(value: Hashable) -> str:
    """A name that equal values share in this process."""
    return _CONTENTS.setdefault(value, str(len(_CONTENTS) + 1))


def shared(answers: Mapping[str, Quantizer]) -> Answers:
    """The answers, as one object with all that are equal."""
    key = _values_of(answers)
    is_fixed = all(quantizer.is_fixed for quantizer in answers.values())
    result = _ANSWERS.get(key)
    if result is None or not (is_fixed or _values_of(result) == key):  # what a user's object holds may change
        result = _ANSWERS[key] = Answers(answers)
        result.likeness = _likeness(key)
        result.name = content(key) if is_fixed else f"n{next(_ANSWER_NUMBERS)}"
    return result


def _values_of(answers: Mapping[str, Quantizer]) -> Hashable:
    return tuple((slot, quantizer.content) for slot, quantizer in answers.items())


def _likeness(word: Hashable) -> Hashable:
    if isinstance(word, Uncompared):
        return word.kind
    return tuple(map(_likeness, word)) if type(word) is tuple else word


def warn_of_identities(answers: Iterable[Answers]) -> None:
    """Warn if answers for modules of one content differ in nothing but objects that are not compared."""
    first: dict[Hashable, Answers] = {}
    for each in answers:
        other = first.setdefault(each.likeness, each)
        if other is not each:
            pairs = zip(each.values(), other.values(), strict=True)
            kind = next(type(one).__name__ for one, same in pairs if one.content != same.content)
            warnings.warn(
                f"quantizers of class {kind} hold objects that are not compared, such as tensors, so each layer "
                "compiles by itself, and torch gives up after 8; hold numbers, strings, lists and dicts, or share one "
                "quantizer",
                stacklevel=2,
            )
