"""The plan of one operand of a linear: its formats, where its planes come from, and what backward gets of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from duotone.dispatch.casts import segment_cast
from duotone.dispatch.rule import JoinedOperand, JoinedWeights
from duotone.dispatch.segments import equal_segments, table
from duotone.dispatch.stages import amax_of
from duotone.formats import Format
from duotone.formats.elements import block_amax
from duotone.linear.backward_operand import BACKWARD_OPERANDS, BackwardOperand, Original, SavedPlane
from duotone.linear.plane_source import ENCODE_NOW, PlaneSource
from duotone.state.amax_mode import AmaxMode
from duotone.state.delayed_slot import DelayedSlot
from duotone.state.traced_slot import TracedSlot
from duotone.tensor.context import LOCAL, QuantizeContext
from duotone.tensor.plane import Planes, Usage
from duotone.tensor.quantizer import Quantizer

if TYPE_CHECKING:
    from duotone.kernels.activations import FusedProducer
    from duotone.kernels.segment_cast import Coded, Segments, Table


@dataclass(frozen=True)
class OperandPlan:
    """How the input, the weight or the gradient of the output becomes planes."""

    quantizer: Quantizer
    source: PlaneSource
    usage: Usage
    """The planes that are encoded together."""

    context: QuantizeContext = LOCAL
    backward: BackwardOperand = BACKWARD_OPERANDS[None]
    """What is kept for the GEMM of backward that reads the operand."""

    is_kept: bool = False
    """Whether backward owes that GEMM."""

    stream: int | None = None
    """The operand's random numbers are those of the call's seed plus this; None if it rounds to nearest."""

    slot_distance: int = 0
    """From the delayed slots of one linear to those of the next, if several share the states of a module."""

    def seeded(self, seed: Tensor | None) -> QuantizeContext:
        """The context of a call. `seed` is int64 (1,), or None if nothing in the plan is stochastic."""
        if self.stream is None or seed is None:
            return self.context
        return self.context.with_seed(seed + self.stream if self.stream else seed)

    def encode(self, x: Tensor, seed: Tensor | None) -> Planes:
        """The planes of a matrix (M, K) that `usage` names."""
        context = self.context if self.stream is None else self.seeded(seed)
        if self.source is ENCODE_NOW:
            return self.quantizer.encode(x, self.usage, context)
        return self.source.planes(x, self.quantizer, self.usage, context)

    def encode_produced(self, producer: "FusedProducer", seed: Tensor | None) -> Planes | None:
        """Like `encode`, but the cast kernel also computes the matrix (a fused norm or activation).

        None if no such kernel applies; the caller then computes the matrix and encodes it.
        """
        return self.quantizer.encode_produced(producer, self.usage, self.seeded(seed))

    def keep(self, x: Original, planes: Planes, seed: Tensor | None) -> SavedPlane | None:
        """What is saved for backward of the matrix `x` and its planes; None if backward does not need the operand."""
        if not self.is_kept:
            return None
        context = self.context if self.stream is None else self.seeded(seed)
        return self.backward.keep(x, planes, self.quantizer, context)

    @property
    def takes_segments(self) -> bool:
        """Whether one cast encodes row segments with scales of their own, and backward reads the columnwise plane.

        The rule of a GEMM says whether it multiplies them (`GemmRule.refuse_segments`).
        """
        quantizer, context = self.quantizer, self.context
        plain = type(quantizer) is Quantizer and quantizer.columnwise_source == "original" and self.source.encodes
        return plain and self.backward is BACKWARD_OPERANDS[None] and context.shard is None and context.traces_kernel

    def encode_segments(
        self, x: Tensor, segments: "Segments"
    ) -> tuple[JoinedOperand | None, Tensor | None, Tensor | None]:
        """The rowwise operand of contiguous (M, K), and the columnwise codes and scales, which are kept as tensors."""
        row, _ = self.formats
        coded = self._cast(x, segments, partial(segment_amaxes, x, segments))
        return None if row is None else join(row, coded.row, coded.row_scale), coded.col, coded.col_scale

    def encode_weights(self, weights: Sequence[Tensor]) -> tuple[JoinedWeights, tuple[Tensor | None, Tensor | None]]:
        """Like `encode_segments`, of tensors (N, K) that are a segment each; columnwise codes are (E, K, N)."""
        weights = [w if w.is_contiguous() else w.contiguous() for w in weights]
        first, count, (n, k) = weights[0], len(weights), weights[0].shape
        segments, (row, _) = equal_segments(n, count, first), self.formats
        coded = self._cast(first, segments, partial(_amaxes, weights), table(weights))
        assert row is not None
        codes, scale = join(row, coded.row, coded.row_scale)[1:]
        joined = JoinedWeights(row, codes.view(count, n, k), scale.view(count, -1))
        if coded.col is None or coded.col_scale is None:
            return joined, (None, None)
        return joined, (coded.col.view(count, k, n), coded.col_scale.view(count, -1))

    @cached_property
    def formats(self) -> tuple[Format | None, Format | None]:
        """Of the planes that `usage` names."""
        rowwise, columnwise = self.usage
        return self.quantizer.rowwise if rowwise else None, self.quantizer.columnwise if columnwise else None

    def _cast(
        self, x: Tensor, segments: "Segments", amaxes: Callable[[], Tensor], where: "Table | None" = None
    ) -> "Coded":
        (row, col), slots = self.formats, self.context.slots
        cast = segment_cast(row, col, x, self.context.propagate)
        assert cast is not None
        slot = None
        if row is not None and row.is_delayed:
            slot = slots[0]
        elif col is not None and col.is_delayed:
            slot = slots[1] or slots[0]
        if slot is None:
            return cast(x, segments, (None, None, 0), where)
        scale, live = slot.place_each(x.device, segments.count, self.slot_distance, amaxes)
        return cast(x, segments, (scale, live, self.slot_distance), where)

    def with_slots(
        self, state: str, member: int, first: int, distance: int, group: str, mode: AmaxMode, backward: bool = False
    ) -> "OperandPlan":
        """The plan whose delayed directions use slots of a state: `first` and the next, of the `member`-th linear."""
        row, col = self.quantizer.delayed
        index = first + member * distance
        slots = (
            DelayedSlot(state, index, group, mode, backward) if row else None,
            DelayedSlot(state, index + 1, group, mode, backward) if col else None,
        )
        return replace(self, context=replace(self.context, slots=slots), slot_distance=distance)

    def with_traced_slots(self, plan: str, member: int, operand: str) -> "OperandPlan":
        """The plan for a graph that equal modules share; `plan` is its name there and `operand` that of this one."""
        slots = [
            TracedSlot(plan, member, operand, side) if asks else None
            for side, asks in enumerate(self.quantizer.delayed)
        ]
        return replace(self, context=replace(self.context, slots=(slots[0], slots[1])))

    def of_module(self, handle: Tensor) -> "OperandPlan":
        """In a trace: the plan with the slots of the module that `handle` names."""
        row, col = self.context.slots
        if row is None and col is None:
            return self
        slots = row and row.of_module(handle), col and col.of_module(handle)
        return replace(self, context=replace(self.context, slots=slots))

    def from_cache(self, source: PlaneSource, columnwise: bool) -> "OperandPlan":
        """The plan of a weight whose planes a cache keeps; with `columnwise` backward reads one of them."""
        if not self.backward.encodes_again:
            return replace(self, source=source)
        return replace(self, source=source, backward=BACKWARD_OPERANDS[None], usage=Usage(True, columnwise))


def join(fmt: Format, codes: Tensor | None, scale: Tensor | None) -> JoinedOperand:
    """Codes as bytes and scales of all segments as an operand."""
    dtype = fmt.code_dtype
    assert dtype is not None and codes is not None and scale is not None
    return JoinedOperand(fmt, codes.view(dtype), scale)


def _amaxes(tensors: Sequence[Tensor]) -> Tensor:
    """fp32 (E,): the largest magnitude of each tensor, NaN ignored."""
    return torch.cat([amax_of(each) for each in tensors])


def segment_amaxes(x: Tensor, segments: "Segments") -> Tensor:
    """fp32 (E,): the largest magnitude in the rows (M, K) of each segment. Rows after the last one do not count."""
    rows = block_amax(x.view(x.shape[0], 1, 1, x.shape[1]))[:, 0]
    ends = segments.ends[: segments.count]
    owners = torch.bucketize(torch.arange(x.shape[0], device=x.device), ends, right=True)
    return rows.new_zeros(segments.count + 1).scatter_reduce(0, owners, rows, "amax")[:-1]
