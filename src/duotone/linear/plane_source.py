"""Where the planes of an operand come from: encoded now, held by a quantized tensor, or its values in high precision.

Chosen when the plan is built; execution only calls `planes`.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from duotone.errors import MissingPlaneError
from duotone.formats import IDENTITY
from duotone.tensor import QuantizedTensor
from duotone.tensor.context import QuantizeContext
from duotone.tensor.plane import Plane, Planes, Usage
from duotone.tensor.quantizer import Quantizer


class PlaneSource(Protocol):
    encodes: ClassVar[bool]
    """Whether the planes are those that the quantizer makes of a plain tensor, now or earlier."""

    def planes(self, x: Tensor, quantizer: Quantizer, usage: Usage, ctx: QuantizeContext) -> Planes:
        """The planes of the matrix `x` that `usage` names."""
        ...


@dataclass(frozen=True, eq=False)
class EncodeNow:
    """A plain tensor: the quantizer encodes it."""

    encodes: ClassVar[bool] = True

    def planes(self, x: Tensor, quantizer: Quantizer, usage: Usage, ctx: QuantizeContext) -> Planes:
        return quantizer.encode(x, usage, ctx)


@dataclass(frozen=True, eq=False)
class HighPrecision:
    """A plain tensor that stays in high precision: what the quantizer would give, at the least cost to the host."""

    encodes: ClassVar[bool] = False

    def planes(self, x: Tensor, quantizer: Quantizer, usage: Usage, ctx: QuantizeContext) -> Planes:
        rowwise, columnwise = usage
        row = Plane(IDENTITY, {"codes": x}, (x.shape[0], x.shape[1])) if rowwise else None
        return Planes(row, Plane(IDENTITY, {"codes": x.t()}, (x.shape[1], x.shape[0])) if columnwise else None)


@dataclass(frozen=True, eq=False)
class UseHeld:
    """A quantized tensor: its planes as they are. A plane that follows without loss is derived and stays with it."""

    encodes: ClassVar[bool] = False

    def planes(self, x: Tensor, quantizer: Quantizer, usage: Usage, ctx: QuantizeContext) -> Planes:
        assert isinstance(x, QuantizedTensor)
        row, col = x.planes
        if (usage.rowwise and row is None) or (usage.columnwise and col is None):
            with torch.inference_mode(False):  # an inference tensor could not be written in training
                x.update_usage(usage.rowwise or None, usage.columnwise or None)
        row, col = x.planes
        return Planes(row if usage.rowwise else None, col if usage.columnwise else None)


@dataclass(frozen=True, eq=False)
class DequantizeHeld:
    """A quantized tensor in a plan that keeps it in high precision: the planes of its values."""

    encodes: ClassVar[bool] = False

    def planes(self, x: Tensor, quantizer: Quantizer, usage: Usage, ctx: QuantizeContext) -> Planes:
        assert isinstance(x, QuantizedTensor)
        return quantizer.encode(x.values(x.dtype), usage, ctx)


ENCODE_NOW, HIGH_PRECISION, USE_HELD, DEQUANTIZE_HELD = EncodeNow(), HighPrecision(), UseHeld(), DequantizeHeld()
IN_HIGH_PRECISION = Quantizer()


def source_of_plain(quantizer: Quantizer) -> PlaneSource:
    """How a plain tensor gets its planes."""
    return HIGH_PRECISION if type(quantizer) is Quantizer and quantizer == IN_HIGH_PRECISION else ENCODE_NOW


def original(x: Tensor, planes: Planes) -> Plane:
    """`x` as it is, (M, K): an alias, or the rowwise plane of a quantized tensor."""
    if not isinstance(x, QuantizedTensor):
        return Plane.of(x)
    plane = x.planes.rowwise or planes.rowwise
    if plane is None:
        raise MissingPlaneError(f"{x!r} has no rowwise plane to keep for backward; create it with that usage")
    return plane
