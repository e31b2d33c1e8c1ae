"""Where the planes of an operand come from: encoded now, held by a quantized tensor, or values in high precision.

The plan names the source; execution calls `planes`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from duotone.formats import IDENTITY
from duotone.tensor import QuantizedTensor
from duotone.tensor.context import QuantizeContext
from duotone.tensor.plane import Plane, Planes, Usage
from duotone.tensor.quantizer import Quantizer


@dataclass(frozen=True, eq=False)
class PlaneSource:
    """How a tensor becomes planes."""

    encodes = False
    """Whether the planes are those that the quantizer makes of a plain tensor, now or earlier."""

    def planes(self, x: Tensor, quantizer: Quantizer, usage: Usage, ctx: QuantizeContext) -> Planes:
        """The planes of the matrix `x` that `usage` names."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class EncodeNow(PlaneSource):
    """A plain tensor, for which `OperandPlan.encode` asks the quantizer itself."""

    encodes = True


@dataclass(frozen=True, eq=False)
class HighPrecision(PlaneSource):
    """A plain tensor that stays in high precision: what the Identity quantizer gives, in less host time."""

    def planes(self, x: Tensor, quantizer: Quantizer, usage: Usage, ctx: QuantizeContext) -> Planes:
        rowwise, columnwise = usage
        row = Plane(IDENTITY, {"codes": x}, (x.shape[0], x.shape[1])) if rowwise else None
        return Planes(row, Plane(IDENTITY, {"codes": x.t()}, (x.shape[1], x.shape[0])) if columnwise else None)


@dataclass(frozen=True, eq=False)
class UseHeld(PlaneSource):
    """The planes of a quantized tensor. One that it lacks is derived if that is lossless, and stays with the tensor."""

    def planes(self, x: Tensor, quantizer: Quantizer, usage: Usage, ctx: QuantizeContext) -> Planes:
        assert isinstance(x, QuantizedTensor)
        row, col = x.planes
        if (usage.rowwise and row is None) or (usage.columnwise and col is None):
            with torch.inference_mode(False):  # an inference tensor could not be written in training
                x.update_usage(usage.rowwise or None, usage.columnwise or None)
            row, col = x.planes
        return Planes(row if usage.rowwise else None, col if usage.columnwise else None)


@dataclass(frozen=True, eq=False)
class DequantizeHeld(PlaneSource):
    """The values of a quantized tensor in a plan that computes in high precision."""

    def planes(self, x: Tensor, quantizer: Quantizer, usage: Usage, ctx: QuantizeContext) -> Planes:
        assert isinstance(x, QuantizedTensor)
        return quantizer.encode(x.values(x.dtype), usage, ctx)


ENCODE_NOW, HIGH_PRECISION, USE_HELD, DEQUANTIZE_HELD = EncodeNow(), HighPrecision(), UseHeld(), DequantizeHeld()
IN_HIGH_PRECISION = Quantizer()


def source_of_plain(quantizer: Quantizer) -> PlaneSource:
    """Where the planes of a plain tensor come from."""
    return HIGH_PRECISION if type(quantizer) is Quantizer and quantizer == IN_HIGH_PRECISION else ENCODE_NOW
