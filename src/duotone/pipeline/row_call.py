"""RowCall: what is constant in the calls of a row. Its ops take one string, since each argument costs host time."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from torch import SymInt, Tensor

PLAIN = 4
"""How rows get an operand that is one plain tensor: four times the number of its parts, see `rows.flat`."""

KEEPING = {"/None": None, "/True": True, "/False": False}
"""Ends of the names of parts that keep tensors between calls, with their `is_first_microbatch`."""
_CALL = "Tensor[] handles, str call, SymInt[] symbols"
RUN = f"(Tensor x, Tensor?[] operands, {_CALL}) -> Tensor[]"
DIFFERENTIATE = f"(Tensor dy, Tensor[] kept, Tensor? token, Tensor?[] sources, {_CALL}) -> Tensor[]"
"""Schemas of the ops of rows."""
INTERFACE = RUN, DIFFERENTIATE, 3
"""The schemas, and a number that changes with what the text of a call means. Names of parts depend on it, since torch
keeps graphs on disk, where a later version of Duotone finds them."""


def digest_of(*content: object) -> str:
    """Name what decides the results of a row, by its text, in 16 characters. The name is equal in all processes."""
    return hashlib.sha256(repr((INTERFACE, content)).encode()).hexdigest()[:16]


class RowPart(NamedTuple):
    """How a graph names a part of a row: as its fields with ";" between them."""

    name: str
    sinks: str = ""
    """Where the gradients of its operands go, a digit for each; "" if autograd gets all."""

    @staticmethod
    def of(text: str) -> "RowPart":
        """The inverse of `text`."""
        return RowPart(*text.rsplit(";", 1))

    @property
    def keeps(self) -> bool:
        """Whether it keeps tensors between calls."""
        return self.name.endswith(tuple(KEEPING))

    @property
    def text(self) -> str:
        """The part as a string. Dynamo knows strings as constants."""
        return ";".join(self)


@dataclass(frozen=True)
class RowCall:
    """`names`: of the parts. `held`: how x and each operand come; minus the number of pieces that are to be joined.

    `sources`: of the tensors of x, of operands and of y, whether backward reads them as they are. `sinks`: where the
    gradients of x and the operands go, 0 for one that nothing needs. `numbers`: see `numbers_of`; () for symbols.
    """

    names: tuple[str, ...]
    held: tuple[int, ...]
    sources: tuple[bool, ...]
    sinks: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The string from which `of` makes an equal call."""
        return json.dumps((self.names, self.held, self.sources, self.sinks, self.numbers))

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(text: str) -> "RowCall":
        """The inverse of `text`."""
        return RowCall(*map(tuple, json.loads(text)))

    @cached_property
    def codes(self) -> tuple[int, ...]:
        """`held` of operands whose pieces are joined."""
        return tuple([max(code, PLAIN) if code < 0 else code for code in self.held])

    @cached_property
    def key(self) -> tuple[object, ...]:
        """What decides how backward finds what forward kept, besides sizes that are symbols in the graph."""
        return self.names, self.codes, self.numbers

    @cached_property
    def choice(self) -> tuple[object, ...]:
        """What decides the calls of a row, besides its tensors."""
        return self.codes, self.sources, self.sinks

    def whole(self, x: Tensor, parts: Sequence[Tensor | None], join: Callable[[Any], Tensor]) -> list[Tensor | None]:
        """The tensors of x and of operands, with those joined that come in pieces."""
        if self.codes == self.held:
            return [x, *parts]
        remaining, whole = iter((x, *parts)), list[Tensor | None]()
        for code in self.held:
            pieces = [next(remaining) for _ in range(-code if code < 0 else code // PLAIN)]
            whole += [join(pieces)] if code < 0 else pieces
        return whole

    @cached_property
    def has_quantized(self) -> bool:
        """Whether x or an operand comes as the parts of a quantized tensor."""
        return any(code % PLAIN for code in self.codes)

    def sizes(self, symbols: Sequence[int]) -> tuple[Sequence[int], ...]:
        """The sizes of x and of each operand. `symbols` are the numbers, if the call does not hold them."""
        return self._sizes if self.numbers else _sizes(symbols)

    def quantized_sizes(self, symbols: Sequence[int]) -> tuple[Sequence[int], ...]:
        """`sizes` if one of them is quantized, since its parts do not tell its size. Else ()."""
        return self.sizes(symbols) if self.has_quantized else ()

    @cached_property
    def _sizes(self) -> tuple[Sequence[int], ...]:
        return _sizes(self.numbers)


def _sizes(numbers: Sequence[int]) -> tuple[Sequence[int], ...]:
    sizes, at = list[Sequence[int]](), 0
    while at < len(numbers):
        sizes.append(tuple(numbers[at + 1 : at + 1 + numbers[at]]))
        at += 1 + 2 * numbers[at]
    return tuple(sizes)


def numbers_of(x: Tensor, operands: Sequence[Tensor | None]) -> tuple[tuple[int, ...], list[Any]]:
    """Of x and of each operand: the number of sizes, these, and the strides.

    They come first if they are constants, and last if some are symbols. The other one is empty.
    """
    numbers = list[Any]()
    for each in (x, *operands):
        numbers += (0,) if each is None else (each.dim(), *each.shape, *each.stride())
    has_symbols = any(isinstance(n, SymInt) for n in numbers)
    return ((), numbers) if has_symbols else (tuple(numbers), [])
