"""The encoder of one operand: planes of matrices like those that it has met, at the least host time."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from duotone.dispatch.casts import PLAIN_TYPES, one_read
from duotone.formats import Format
from duotone.tensor.context import QuantizeContext
from duotone.tensor.plane import Plane, Planes, encode_once

if TYPE_CHECKING:
    from duotone.kernels.repeated_cast import MaybeParts, RepeatedCast

    Known = tuple[RepeatedCast, Callable[..., tuple[MaybeParts, MaybeParts]], bool]

SHAPES = 64
"""How many kinds of matrices an encoder remembers."""


class Encoder:
    """`encode_once` in two formats and one context without a shard or a seed. Not for traces."""

    def __init__(self, row: Format | None, col: Format | None, ctx: QuantizeContext) -> None:
        self.row, self.col, self.ctx = row, col, ctx
        delayed = [fmt is not None and fmt.is_delayed for fmt in (row, col)]
        slot = ctx.slots[0] if delayed[0] else ctx.slots[1] or ctx.slots[0]
        self.row_delayed, self.slot = delayed[0], slot if any(delayed) else None
        self._known: dict[tuple[object, ...], Known] = {}

    def __call__(self, x: Tensor) -> Planes | None:
        if type(x) not in PLAIN_TYPES or not x.is_contiguous():
            return encode_once(self.row, self.col, x, self.ctx)
        address, index, shape = x.data_ptr(), x.get_device(), x.shape
        key = shape, x.dtype, address & 15, index
        known = self._known.get(key)
        if known is None or index != torch._C._cuda_getDevice():
            return self._first(x, key)
        repeat, cast, records = known
        row, col = self.row, self.col
        if self.slot is None:
            of_row, of_col = repeat(address, None, None, None)
        else:
            scale, live = self.slot.place(x)
            scales = (scale, None) if self.row_delayed else (None, scale)
            again = records is not (live is None)
            of_row, of_col = repeat(address, *scales, live) if again else cast(x, scales, live, typed=self.ctx.typed)
        rows, cols = shape
        return Planes(
            None if row is None or of_row is None else Plane(row, of_row, (rows, cols)),
            None if col is None or of_col is None else Plane(col, of_col, (cols, rows)),
        )

    def _first(self, x: Tensor, key: tuple[object, ...]) -> Planes | None:
        """Encode, and remember how if the cast repeats itself."""
        planes = encode_once(self.row, self.col, x, self.ctx)
        cast = None if planes is None else one_read(self.row, self.col, x, self.ctx.propagate)
        if cast is None or cast.repeated is None:
            return planes
        if len(self._known) >= SHAPES:
            self._known.clear()
        for records in (False, True):  # the latter where both are known
            repeat = cast.repeated(x, records, self.ctx.typed)
            if repeat is not None:
                self._known[key] = repeat, cast, records
        return planes
