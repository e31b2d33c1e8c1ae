"""The plan of one operand of a linear: its formats, where its planes come from, and what backward gets of it.

`backward_override` of a recipe and options of a module choose a `BackwardOperand` when the plan is built.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from duotone.errors import MissingPlaneError
from duotone.formats import IDENTITY, Format
from duotone.linear.plane_source import ENCODE_NOW, PlaneSource
from duotone.tensor import QuantizedTensor
from duotone.tensor.context import QuantizeContext, Slot
from duotone.tensor.encoder import Encoder
from duotone.tensor.plane import DeferredPlane, Plane, Planes, Usage
from duotone.tensor.quantizer import Quantizer

if TYPE_CHECKING:
    from duotone.dispatch.cast_ops import TracedProducer
    from duotone.kernels.activations import FusedProducer


SavedPlane = Plane | DeferredPlane
Original = Tensor | DeferredPlane | None
"""The matrix (M, K) of which planes were encoded, what stands for it, or None if nobody looks at it."""

COLUMNWISE = Usage(False, True)


@dataclass(frozen=True, eq=False)
class BackwardOperand:
    """What forward saves of an operand, and the plane that backward multiplies. The defaults are a columnwise plane."""

    quantizes_gradient = True
    """Whether backward multiplies planes, so that the gradient of the output is quantized."""

    needs_columnwise = True
    """Whether forward encodes the columnwise plane."""

    keeps_original = False
    """Whether the tensor itself is saved."""

    encodes_again = False
    """Whether backward encodes the tensor once more."""

    takes_producer = False
    """Whether backward may encode the plane from what a fused producer saves."""

    token_dim = 1
    """The dimension of a saved plane of the input that the rows of the activation lie along."""

    def format(self, quantizer: Quantizer) -> Format:
        """The format of the operand in the GEMM of backward."""
        return quantizer.columnwise or IDENTITY

    def keep(self, x: Original, planes: Planes, quantizer: Quantizer, ctx: QuantizeContext) -> SavedPlane:
        """What to save of the matrix `x` and its planes."""
        raise NotImplementedError

    def restore(self, plane: Plane, dtype: torch.dtype) -> Plane:
        """The operand of the GEMM, contraction last. `dtype` is for operands in high precision."""
        return plane


@dataclass(frozen=True, eq=False)
class KeepColumnwise(BackwardOperand):
    """The columnwise plane in the format that the recipe names."""

    def keep(self, x: Original, planes: Planes, quantizer: Quantizer, ctx: QuantizeContext) -> SavedPlane:
        assert planes.columnwise is not None
        return planes.columnwise


@dataclass(frozen=True, eq=False)
class ReencodeInBackward(BackwardOperand):
    """The columnwise plane, which backward encodes from the saved tensor, with the bits that forward would give."""

    needs_columnwise = False
    keeps_original = encodes_again = True

    def keep(self, x: Original, planes: Planes, quantizer: Quantizer, ctx: QuantizeContext) -> SavedPlane:
        assert isinstance(x, Tensor)
        return DeferredPlane(partial(columnwise, quantizer, ctx.fixed()), (x,))


@dataclass(frozen=True, eq=False)
class ReencodeInGraph(ReencodeInBackward):
    """The same in a trace, of a tensor that the partitioner may compute again.

    It saves what is read by an op that fuses with nothing, such as a cast. So the cast reads a power of 1.0, which
    fuses with what makes the tensor. Copies, and products with 1, would be dropped before. After a fused producer, the
    cast is that of `ReencodeFromProducer`.
    """

    takes_producer = True

    def keep(self, x: Original, planes: Planes, quantizer: Quantizer, ctx: QuantizeContext) -> SavedPlane:
        assert isinstance(x, Tensor)
        return DeferredPlane(partial(columnwise_of_power, quantizer, ctx.fixed()), (x,))


@dataclass(frozen=True, eq=False)
class ReencodeFromProducer(KeepColumnwise):
    """The columnwise plane. After a fused producer, backward encodes it from what the producer saves."""

    takes_producer = True


@dataclass(frozen=True, eq=False)
class UseSupplied(BackwardOperand):
    """The plane that a fused stage supplies in the place of the original."""

    def keep(self, x: Original, planes: Planes, quantizer: Quantizer, ctx: QuantizeContext) -> SavedPlane:
        assert isinstance(x, DeferredPlane)
        return x


@dataclass(frozen=True, eq=False)
class Decode(BackwardOperand):
    """A rowwise plane that backward decodes: its GEMMs run in high precision."""

    quantizes_gradient = needs_columnwise = False
    token_dim = 0

    def format(self, quantizer: Quantizer) -> Format:
        return IDENTITY

    def restore(self, plane: Plane, dtype: torch.dtype) -> Plane:
        return Plane.of(plane.dequantize(dtype).t())


@dataclass(frozen=True, eq=False)
class KeepOriginal(Decode):
    """The tensor as it is: an alias, or the rowwise plane of a quantized tensor."""

    keeps_original = True

    def keep(self, x: Original, planes: Planes, quantizer: Quantizer, ctx: QuantizeContext) -> SavedPlane:
        assert isinstance(x, Tensor)
        if not isinstance(x, QuantizedTensor):
            return Plane.of(x)
        plane = x.planes.rowwise or planes.rowwise
        _note_rowwise(x)
        if plane is None:
            raise MissingPlaneError(f"{x!r} has no rowwise plane to keep for backward; create it with that usage")
        return plane


@dataclass(frozen=True, eq=False)
class DequantizeRowwise(Decode):
    """The plane that fprop multiplied."""

    def keep(self, x: Original, planes: Planes, quantizer: Quantizer, ctx: QuantizeContext) -> SavedPlane:
        assert planes.rowwise is not None
        _note_rowwise(x)
        return planes.rowwise


def _note_rowwise(x: Original) -> None:
    """Let FSDP2 gather the rowwise plane of a weight for backward, too."""
    if not torch.compiler.is_dynamo_compiling() and isinstance(x, QuantizedTensor) and x.gathers is not None:
        x.gathers.keeps_rowwise = True


def columnwise(quantizer: Quantizer, ctx: QuantizeContext, x: Tensor) -> Plane:
    """The columnwise plane of a matrix, alone."""
    plane = quantizer.encode(x, COLUMNWISE, ctx).columnwise
    assert plane is not None
    return plane


def columnwise_of_power(quantizer: Quantizer, ctx: QuantizeContext, x: Tensor) -> Plane:
    return columnwise(quantizer, ctx, x.pow(1.0))


BACKWARD_OPERANDS: dict[str | None, BackwardOperand] = {
    None: KeepColumnwise(),
    "high_precision": KeepOriginal(),
    "dequantized": DequantizeRowwise(),
}
"""By `backward_override`."""

REENCODE_IN_BACKWARD, REENCODE_IN_GRAPH = ReencodeInBackward(), ReencodeInGraph()
REENCODE_FROM_PRODUCER, USE_SUPPLIED = ReencodeFromProducer(), UseSupplied()


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
    """Whether backward owes that GEMM."""

    stream: int | None = None
    """The operand's random numbers are those of the call's seed plus this; None if it rounds to nearest."""

    slot_distance: int = 0
    """From the delayed slots of one linear to those of the next in the states of a module."""

    def seeded(self, seed: Tensor | None) -> QuantizeContext:
        """The context of a call. `seed` is int64 (1,), or None if nothing in the plan is stochastic."""
        if self.stream is None or seed is None:
            return self.context
        return self.context.with_seed(seed + self.stream if self.stream else seed)

    def encode(self, x: Tensor, seed: Tensor | None) -> Planes:
        """The planes of a matrix (M, K) that `usage` names."""
        context = self.context if self.stream is None else self.seeded(seed)
        if self.source is not ENCODE_NOW:
            return self.source.planes(x, self.quantizer, self.usage, context)
        if x.is_cuda and context is self.context and not torch.compiler.is_dynamo_compiling():
            planes = None if self.encoder is None else self.encoder(x)
            if planes is not None:
                return planes
        return self.quantizer.encode(x, self.usage, context)

    def encode_produced(self, producer: "FusedProducer | TracedProducer", seed: Tensor | None) -> Planes | None:
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
    def fuses_in_graphs(self) -> bool:
        """Whether a graph has an op that also makes the matrix."""
        return self.is_simple and self.context.traces_kernel

    @property
    def is_simple(self) -> bool:
        """Whether both planes encode the matrix itself, and no shard or class of the user has a say in it."""
        plain = type(self.quantizer) is Quantizer and self.quantizer.columnwise_source == "original"
        return plain and self.context.shard is None

    @cached_property
    def encoder(self) -> Encoder | None:
        """Of calls without a seed in eager code."""
        return Encoder(*self.formats, self.context) if self.is_simple else None

    @cached_property
    def formats(self) -> tuple[Format | None, Format | None]:
        """Of the planes that `usage` names."""
        rowwise, columnwise = self.usage
        return self.quantizer.rowwise if rowwise else None, self.quantizer.columnwise if columnwise else None

    def with_slots(self, slot: Callable[[int], Slot]) -> "OperandPlan":
        """The plan whose delayed directions use `slot(0)` rowwise and `slot(1)` columnwise."""
        row, col = self.quantizer.delayed
        slots = slot(0) if row else None, slot(1) if col else None
        return replace(self, context=replace(self.context, slots=slots))

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
