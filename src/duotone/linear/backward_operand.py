"""Where a backward GEMM takes its operand from: which plane forward keeps, and what backward makes of it.

The three answers are the values of `backward_override`; execution only calls `keep` and `restore`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from duotone.formats import IDENTITY, Format
from duotone.linear.plane_source import original
from duotone.tensor.context import QuantizeContext
from duotone.tensor.plane import Plane, Planes, Usage
from duotone.tensor.quantizer import Quantizer
from duotone.tensor.saving import DeferredPlane


class BackwardOperand(Protocol):
    name: str
    quantizes_gradient: bool
    """Whether backward multiplies planes, so that the gradient of the output is quantized."""

    needs_columnwise: bool
    """Whether forward makes the columnwise plane."""

    keeps_original: bool
    """Whether what is kept is the tensor itself and not a plane of it."""

    encodes_again: bool
    """Whether backward encodes the original once more."""

    token_dim: int
    """The dimension of a kept plane of the input that holds the rows of the activation."""

    def format(self, quantizer: Quantizer) -> Format:
        """The format that the backward GEMM meets."""
        ...

    def keep(self, x: Tensor, planes: Planes, quantizer: Quantizer, ctx: QuantizeContext) -> Any:
        """The plane to save, or the `DeferredPlane` that makes it. `x` is the original (M, K)."""
        ...

    def restore(self, plane: Plane, dtype: torch.dtype) -> Plane:
        """The operand of the backward GEMM, contraction last."""
        ...


@dataclass(frozen=True, eq=False)
class KeepColumnwise:
    """The columnwise plane that the recipe names."""

    name = "quantized"
    quantizes_gradient = needs_columnwise = True
    keeps_original = encodes_again = False
    token_dim = 1

    def format(self, quantizer: Quantizer) -> Format:
        return quantizer.columnwise or IDENTITY

    def keep(self, x: Tensor, planes: Planes, quantizer: Quantizer, ctx: QuantizeContext) -> Any:
        assert planes.columnwise is not None
        return planes.columnwise

    def restore(self, plane: Plane, dtype: torch.dtype) -> Plane:
        return plane


class ReencodeInBackward(KeepColumnwise):
    """The columnwise plane, which backward makes of the original with the bits that forward would have made."""

    name = "remade"
    needs_columnwise = False
    keeps_original = encodes_again = True

    def keep(self, x: Tensor, planes: Planes, quantizer: Quantizer, ctx: QuantizeContext) -> Any:
        return DeferredPlane(partial(columnwise, quantizer, ctx.fixed()), (x,))


class ReencodeFromProducer(KeepColumnwise):
    """The columnwise plane; that of an input which a producer hands over, backward makes of what the producer keeps."""

    name = "recomputed"


class UseSupplied(KeepColumnwise):
    """What is given in the place of the original."""

    name = "as given"

    def keep(self, x: Any, planes: Planes, quantizer: Quantizer, ctx: QuantizeContext) -> Any:
        return x


@dataclass(frozen=True, eq=False)
class KeepOriginal:
    """The original tensor, in high precision."""

    name = "high_precision"
    quantizes_gradient = needs_columnwise = encodes_again = False
    keeps_original = True
    token_dim = 0

    def format(self, quantizer: Quantizer) -> Format:
        return IDENTITY

    def keep(self, x: Tensor, planes: Planes, quantizer: Quantizer, ctx: QuantizeContext) -> Any:
        return original(x, planes)

    def restore(self, plane: Plane, dtype: torch.dtype) -> Plane:
        return Plane.of(plane.dequantize(dtype).t())


@dataclass(frozen=True, eq=False)
class DequantizeRowwise:
    """The very plane that fprop multiplied, decoded in backward."""

    name = "dequantized"
    quantizes_gradient = needs_columnwise = keeps_original = encodes_again = False
    token_dim = 0

    def format(self, quantizer: Quantizer) -> Format:
        return IDENTITY

    def keep(self, x: Tensor, planes: Planes, quantizer: Quantizer, ctx: QuantizeContext) -> Any:
        assert planes.rowwise is not None
        return planes.rowwise

    def restore(self, plane: Plane, dtype: torch.dtype) -> Plane:
        return Plane.of(plane.dequantize(dtype).t())


def columnwise(quantizer: Quantizer, ctx: QuantizeContext, x: Tensor) -> Plane:
    """The columnwise plane alone of a matrix."""
    made = quantizer.encode(x, COLUMNWISE, ctx).columnwise
    assert made is not None
    return made


COLUMNWISE = Usage(False, True)


BACKWARD_OPERANDS: dict[str | None, BackwardOperand] = {
    None: KeepColumnwise(),
    "high_precision": KeepOriginal(),
    "dequantized": DequantizeRowwise(),
}

REENCODE_IN_BACKWARD, REENCODE_FROM_PRODUCER, USE_SUPPLIED = ReencodeInBackward(), ReencodeFromProducer(), UseSupplied()
