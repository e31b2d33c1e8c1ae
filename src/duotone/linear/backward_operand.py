"""Where a backward GEMM takes its operand from: what forward saves, and what backward makes of it.

`backward_override` of a recipe and options of a module choose one when the plan is built.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from duotone.errors import MissingPlaneError
from duotone.formats import IDENTITY, Format
from duotone.tensor import QuantizedTensor
from duotone.tensor.context import QuantizeContext
from duotone.tensor.plane import DeferredPlane, Plane, Planes, Usage
from duotone.tensor.quantizer import Quantizer

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
class ReencodeFromProducer(KeepColumnwise):
    """The columnwise plane. After a fused producer, backward encodes it from what the producer saves."""


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
        if plane is None:
            raise MissingPlaneError(f"{x!r} has no rowwise plane to keep for backward; create it with that usage")
        return plane


@dataclass(frozen=True, eq=False)
class DequantizeRowwise(Decode):
    """The plane that fprop multiplied."""

    def keep(self, x: Original, planes: Planes, quantizer: Quantizer, ctx: QuantizeContext) -> SavedPlane:
        assert planes.rowwise is not None
        return planes.rowwise


def columnwise(quantizer: Quantizer, ctx: QuantizeContext, x: Tensor) -> Plane:
    """The columnwise plane of a matrix, alone."""
    plane = quantizer.encode(x, COLUMNWISE, ctx).columnwise
    assert plane is not None
    return plane


BACKWARD_OPERANDS: dict[str | None, BackwardOperand] = {
    None: KeepColumnwise(),
    "high_precision": KeepOriginal(),
    "dequantized": DequantizeRowwise(),
}
"""By `backward_override`."""

REENCODE_IN_BACKWARD, REENCODE_FROM_PRODUCER, USE_SUPPLIED = ReencodeInBackward(), ReencodeFromProducer(), UseSupplied()
