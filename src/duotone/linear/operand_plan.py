"""The plan of one operand of a linear: its formats, the source of its planes, and its form in backward.

`backward_override` of a recipe and options of a module choose a `BackwardOperand` when the plan is built.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from duotone.errors import MissingPlaneError, UserError
from duotone.formats import IDENTITY, Format
from duotone.linear.plane_source import ENCODE_NOW, HIGH_PRECISION, PlaneSource
from duotone.tensor import QuantizedTensor
from duotone.tensor.context import FixedScale, QuantizeContext, Slot
from duotone.tensor.plane import DeferredPlane, Plane, Planes, Usage
from duotone.tensor.quantizer import Quantizer

if TYPE_CHECKING:
    from duotone.kernels.activations import FusedProducer


SavedPlane = Plane | DeferredPlane
Original = Tensor | DeferredPlane | None
"""The matrix (M, K) whose planes were encoded, a producer in its place, or None if nothing reads it."""

COLUMNWISE = Usage(False, True)


@dataclass(frozen=True, eq=False)
class BackwardOperand:
    """What forward saves of an operand, and the plane that backward multiplies."""

    name: str
    keep: Callable[["OperandPlan", Original, Planes, Tensor | None], SavedPlane] = field(repr=False)
    """What to save of a matrix and its planes. The last argument is the seed of the call."""

    quantizes_gradient: bool = True
    """Whether backward multiplies columnwise planes, so that the gradient of the output is quantized.

    Else it decodes a rowwise plane, and its GEMMs run in high precision.
    """

    needs_columnwise: bool = True
    """Whether forward encodes the columnwise plane."""

    keeps_original: bool = False
    """Whether the tensor itself is saved."""

    takes_producer: bool = False
    """Whether backward may encode the plane from what a fused producer saves."""

    @property
    def encodes_again(self) -> bool:
        """Whether backward encodes the tensor once more."""
        return self.quantizes_gradient and not self.needs_columnwise

    @property
    def token_dim(self) -> int:
        """The dimension of a saved plane of the input that the rows of the activation lie along."""
        return int(self.quantizes_gradient)

    def format(self, quantizer: Quantizer) -> Format:
        """The format of the operand in the GEMM of backward."""
        return (quantizer.columnwise if self.quantizes_gradient else None) or IDENTITY

    def restore(self, plane: Plane, dtype: torch.dtype) -> Plane:
        """The operand of the GEMM, contraction last. `dtype` is for operands in high precision."""
        return plane if self.quantizes_gradient else Plane.of(plane.dequantize(dtype).t())


def _columnwise(operand: "OperandPlan", x: Original, planes: Planes, seed: Tensor | None) -> SavedPlane:
    assert planes.columnwise is not None
    return planes.columnwise


def _deferred(operand: "OperandPlan", x: Original, planes: Planes, seed: Tensor | None) -> SavedPlane:
    assert isinstance(x, Tensor)
    return operand.deferred(columnwise, (x.detach(),), seed)  # `x.data = y` gives x other memory, but not this


def _supplied(operand: "OperandPlan", x: Original, planes: Planes, seed: Tensor | None) -> SavedPlane:
    assert isinstance(x, DeferredPlane)
    return x


def _original(operand: "OperandPlan", x: Original, planes: Planes, seed: Tensor | None) -> SavedPlane:
    assert isinstance(x, Tensor)
    if not isinstance(x, QuantizedTensor):
        return Plane.of(x.detach())
    plane = x.planes.rowwise or planes.rowwise
    _note_rowwise(x)
    if plane is None:
        raise MissingPlaneError(f"{x!r} has no rowwise plane to keep for backward; create it with that usage")
    return plane


def _rowwise(operand: "OperandPlan", x: Original, planes: Planes, seed: Tensor | None) -> SavedPlane:
    assert planes.rowwise is not None
    _note_rowwise(x)
    return planes.rowwise


def _note_rowwise(x: Original) -> None:
    """Let FSDP2 gather the rowwise plane of a weight for backward as well."""
    if isinstance(x, QuantizedTensor) and x.gathers is not None:
        x.gathers.keeps_rowwise = True


def columnwise(operand: "OperandPlan", seed: Tensor | None, x: Tensor) -> Plane:
    """Only the columnwise plane of a matrix. UserError for a weight that has no memory now."""
    if type(x) is Tensor and x.numel() and not x.untyped_storage().nbytes():
        raise UserError(
            "backward reaches a weight that FSDP2 has freed and not gathered again; let the loss come through what the "
            "forward of the sharded module returns, or give fully_shard reshard_after_forward=False"
        )
    plane = operand.quantizer.encode(x, COLUMNWISE, operand.seeded(seed)).columnwise
    assert plane is not None
    return plane


def _scaled(
    encode: Callable[..., Plane], operand: "OperandPlan", seed: Tensor | None, scale: Tensor, *tensors: Tensor | None
) -> Plane:
    """What `encode` gives with this delayed scale, fp32 (1,)."""
    context = replace(operand.context, slots=(FixedScale(scale), None))
    return encode(replace(operand, context=context), seed, *tensors)


BACKWARD_OPERANDS: dict[str | None, BackwardOperand] = {
    None: BackwardOperand("columnwise", _columnwise),
    "high_precision": BackwardOperand("original", _original, False, False, True),
    "dequantized": BackwardOperand("rowwise, dequantized", _rowwise, False, False),
}
"""By `backward_override`: the columnwise plane, the tensor as it is, or the plane that fprop multiplied."""

REENCODE_IN_BACKWARD = BackwardOperand("encoded again", _deferred, needs_columnwise=False, keeps_original=True)
"""The columnwise plane, which backward encodes from the saved tensor, with the bits that forward would give."""
REENCODE_IN_GRAPH = replace(REENCODE_IN_BACKWARD, takes_producer=True)
"""REENCODE_IN_BACKWARD in a graph, whose partitioner may compute the tensor again."""
REENCODE_FROM_PRODUCER = replace(BACKWARD_OPERANDS[None], takes_producer=True)
"""The columnwise plane. After a fused producer, backward encodes it from what the producer saves."""
USE_SUPPLIED = BackwardOperand("supplied", _supplied)
"""The plane that a fused stage supplies in the place of the original."""


@dataclass(frozen=True)
class OperandPlan:
    """How the input, the weight or the gradient of the output becomes planes."""

    quantizer: Quantizer
    source: PlaneSource
    usage: Usage
    """The planes that are encoded together."""

    context: QuantizeContext
    backward: BackwardOperand
    """What is kept for the GEMM of backward that reads the operand."""

    is_kept: bool = False
    """Whether backward computes that GEMM."""

    stream: int | None = None
    """Added to the seed of a call for the random numbers of this operand. None if it rounds to nearest."""

    slot_distance: int = 0
    """The distance from the delayed slots of one linear to those of the next one in the states of a module."""

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
        return self.backward.keep(self, x, planes, seed) if self.is_kept else None

    def deferred(
        self, encode: Callable[..., Plane], tensors: tuple[Tensor | None, ...], seed: Tensor | None
    ) -> DeferredPlane:
        """The plane `encode(plan, seed, *tensors)`, which backward computes with the scale and seed of this forward."""
        assert tensors[0] is not None
        plan, slot = self, self.context.slots[0]
        scale = None if slot is None else slot.scale_now(tensors[0])
        if scale is not None:
            plan = replace(self, context=self.context.without_slots())
            encode, tensors = partial(_scaled, encode), (scale, *tensors)
        return DeferredPlane(partial(encode, plan), tensors, seed if self.stream is not None else None)

    @cached_property
    def formats(self) -> tuple[Format | None, Format | None]:
        """The formats of the planes that `usage` names."""
        rowwise, columnwise = self.usage
        return self.quantizer.rowwise if rowwise else None, self.quantizer.columnwise if columnwise else None

    @property
    def differentiates_original(self) -> bool:
        """Whether backward multiplies the tensor as it is. No plane that forward reads has these values."""
        return self.backward is BACKWARD_OPERANDS["high_precision"] and self.quantizer.rowwise != IDENTITY

    def with_slots(self, slot: Callable[[int], Slot]) -> "OperandPlan":
        """The plan whose delayed directions use `slot(0)` rowwise and `slot(1)` columnwise."""
        row, col = self.quantizer.delayed
        slots = slot(0) if row else None, slot(1) if col else None
        return replace(self, context=replace(self.context, slots=slots))

    @property
    def may_share(self) -> bool:
        """Whether what is kept may share the memory of the operand."""
        quantizer = self.quantizer
        is_identity = IDENTITY in (quantizer.rowwise, quantizer.columnwise)
        return is_identity or self.backward.keeps_original or not self.source.encodes

    @property
    def is_known(self) -> bool:
        """Whether neither a user's quantizer nor a tap, which records each plane, encodes the operand."""
        return type(self.quantizer) is Quantizer and self.quantizer.is_fixed

    @property
    def is_bindable(self) -> bool:
        """Whether shapes decide all calls of `encode` and `keep`. Those of held planes tell FSDP2 what they read."""
        known = self.is_known and self.source in (HIGH_PRECISION, ENCODE_NOW)
        opens = all(slot is None or slot.is_openable for slot in self.context.slots)
        return known and opens and self.context.shard is None

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The delayed slots that one `encode` opens, in order."""
        (row, col), (rowwise, columnwise) = self.context.slots, self.usage
        derives = self.quantizer.derives_columnwise or self.quantizer.columnwise_source != "original"
        opened = row if rowwise or (columnwise and derives) else None, col if columnwise else None
        return tuple([slot for slot in opened if slot is not None])

    def opened(self, slots: Mapping[Slot, Slot]) -> "OperandPlan":
        """The plan of one call, which has opened slots."""
        row, col = self.context.slots
        opened = row and slots.get(row, row), col and slots.get(col, col)
        return replace(self, context=replace(self.context, slots=opened))

    def from_cache(self, source: PlaneSource, columnwise: bool) -> "OperandPlan":
        """The plan of a weight whose planes a cache keeps; with `columnwise` backward reads one of them."""
        if not self.backward.encodes_again:
            return replace(self, source=source)
        return replace(self, source=source, backward=BACKWARD_OPERANDS[None], usage=Usage(True, columnwise))
