"""How the operands of linears over row segments are encoded: all segments by one kernel, or from what is cached."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from duotone.dispatch import segments as native
from duotone.dispatch.casts import segment_cast
from duotone.dispatch.rule import JoinedOperand, JoinedWeights
from duotone.dispatch.stages import amax_of
from duotone.formats import Format
from duotone.formats.stages import block_amax
from duotone.linear.core import LinearStage
from duotone.linear.operand_plan import OperandPlan
from duotone.state.delayed_slot import DelayedSlot
from duotone.tensor.quantizer import Quantizer

if TYPE_CHECKING:
    from duotone.kernels.segment_cast import Segments

Coded = tuple[JoinedOperand | None, Tensor | None, Tensor | None]


def joined(fmt: Format, codes: Any, scale: Any) -> JoinedOperand:
    """Codes as bytes and scales of all segments as an operand."""
    return JoinedOperand(fmt, codes.view(fmt.code_dtype), scale)


def _weights(fmt: Format, codes: Any, scale: Any) -> JoinedWeights:
    return JoinedWeights(fmt, codes.view(fmt.code_dtype), scale)


@dataclass(frozen=True, eq=False)
class Encoder:
    """How one operand of all linears is encoded.

    `slot` is the first one's where scales are delayed, `distance` how many slots lie between one linear and the next.
    """

    row: Format | None
    col: Format | None
    slot: DelayedSlot | None = None
    distance: int = 0
    propagate: bool = True

    @staticmethod
    def of(operands: Sequence[OperandPlan]) -> "Encoder | None":
        """None where kernels do not encode segments so."""
        contexts, quantizer, usage = [one.context for one in operands], operands[0].quantizer, operands[0].usage
        context = contexts[0]
        if type(quantizer) is not Quantizer or quantizer.columnwise_source != "original":
            return None
        if context.shard is not None or not context.traces_kernel:
            return None
        row, col = quantizer.rowwise if usage.rowwise else None, quantizer.columnwise if usage.columnwise else None
        if row is not None and row.is_delayed:
            slots = [context.slots[0] for context in contexts]
        elif col is not None and col.is_delayed:
            slots = [context.slots[1] or context.slots[0] for context in contexts]
        else:
            return Encoder(row, col, propagate=context.propagate)
        first, places = slots[0], [slot.index for slot in slots if isinstance(slot, DelayedSlot)]
        distance = places[1] - places[0] if len(places) > 1 else 0
        if not isinstance(first, DelayedSlot) or places != [first.index + i * distance for i in range(len(slots))]:
            return None
        return Encoder(row, col, first, distance, context.propagate)

    def encode(self, x: Tensor, segments: "Segments") -> Coded:
        """Contiguous (M, K): the rowwise operand, and the columnwise codes and scales, which are kept as tensors."""
        cast = segment_cast(self.row, self.col, x, self.propagate)
        assert cast is not None
        amaxes = partial(_segment_amaxes, x, segments)
        row, row_scale, col, col_scale = cast(x, segments, self._given(x, segments.count, amaxes))
        return (None if self.row is None else joined(self.row, row, row_scale)), col, col_scale

    def encode_each(self, weights: Sequence[Tensor]) -> Any:
        """As `encode` of tensors (N, K) of their own, each a segment; columnwise codes are (K, N) of each."""
        first = weights[0]
        cast = segment_cast(self.row, self.col, first, self.propagate)
        assert cast is not None
        segments = native.equal_segments(first.shape[0], len(weights), first)
        amaxes = partial(_amaxes, weights)
        return cast(first, segments, self._given(first, len(weights), amaxes), native.table(weights))

    def _given(self, x: Tensor, count: int, amaxes: Callable[[], Tensor]) -> tuple[Tensor | None, Tensor | None, int]:
        if self.slot is None:
            return None, None, 0
        return *self.slot.place_each(x.device, count, self.distance, amaxes), self.distance


def _amaxes(tensors: Sequence[Tensor]) -> Tensor:
    """fp32 (count,): the largest magnitude of each, NaN ignored."""
    return torch.cat([amax_of(each) for each in tensors])


def _segment_amaxes(x: Tensor, segments: Any) -> Tensor:
    """As `_amaxes` of the rows (M, K) of each segment; what is behind the last one belongs to none."""
    rows = block_amax(x.view(x.shape[0], 1, 1, x.shape[1]))[:, 0]
    ends = segments.ends[: segments.count]
    owners = torch.bucketize(torch.arange(x.shape[0], device=x.device), ends, right=True)
    return rows.new_zeros(segments.count + 1).scatter_reduce(0, owners, rows, "amax")[:-1]


@dataclass(frozen=True, eq=False)
class Fresh:
    """Weights that every forward encodes: one tensor for the codes of all."""

    encoder: Encoder

    def encode(self, weights: Sequence[Tensor]) -> tuple[JoinedWeights, tuple[Any, ...]]:
        """The rowwise operand, and what backward needs of the columnwise one."""
        weights = [w if w.is_contiguous() else w.contiguous() for w in weights]
        row, row_scale, col, col_scale = self.encoder.encode_each(weights)
        count, (n, k) = len(weights), weights[0].shape
        assert self.encoder.row is not None
        rows = _weights(self.encoder.row, row.view(count, n, k), row_scale.view(count, -1))
        if col is None:
            return rows, (None, None)
        return rows, (col.view(count, k, n), col_scale.view(count, -1))

    def restore(self, kept: Sequence[Tensor]) -> JoinedWeights:
        assert self.encoder.col is not None
        return _weights(self.encoder.col, kept[0], kept[1])


@dataclass(frozen=True, eq=False)
class Cached:
    """Weights of which each linear has its planes, or makes them, and keeps them."""

    linears: tuple[LinearStage, ...]

    def encode(self, weights: Sequence[Tensor]) -> tuple[JoinedWeights, tuple[Any, ...]]:
        """As `Fresh.encode`, a tensor for each linear."""
        rows, cols = [], []
        for linear, weight in zip(self.linears, weights, strict=True):
            row, col = linear.plan.weight.encode(weight, None)
            rows.append(row)
            cols.append(col)
        kept = () if cols[0] is None else (*self._codes(cols), *self._scales(cols))
        return JoinedWeights(rows[0].format, self._codes(rows), self._scales(rows)), kept

    def restore(self, kept: Sequence[Tensor]) -> JoinedWeights:
        count = len(self.linears)
        return JoinedWeights(self.linears[0].plan.dgrad.b, kept[:count], kept[count:])

    @staticmethod
    def _codes(planes: Sequence[Any]) -> list[Tensor]:
        return [plane.parts["codes"].contiguous().view(plane.format.code_dtype) for plane in planes]

    @staticmethod
    def _scales(planes: Sequence[Any]) -> list[Tensor]:
        return [plane.parts["scale"].view(-1) for plane in planes]
