"""Heads as planes: for products over the width of heads, and for products over their tokens."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.dispatch.casts import contiguous_rows
from duotone.dispatch.stages import stages_for
from duotone.formats import IDENTITY, Format
from duotone.formats.geometry import TENSOR
from duotone.tensor import QuantizedTensor
from duotone.tensor.context import QuantizeContext
from duotone.tensor.plane import Plane, Usage
from duotone.tensor.plane_encoder import encode_plane
from duotone.tensor.quantizer import Quantizer

TILE = 128
"""Queries and keys of one tile of the matrix of scores."""


@dataclass(frozen=True)
class HeadOperand:
    """How query, key, value or the gradient of the output become planes.

    Heads are (batch, groups, heads, tokens, width). The rowwise plane serves products over the width, the columnwise
    plane serves products over tokens. Under scales of the whole tensor they are the matrix (batch tokens, heads width)
    and its transpose. Otherwise they are (heads tokens, width) and (heads width, tokens), so that no block reaches into
    another head.
    """

    quantizer: Quantizer
    context: QuantizeContext
    stream: int = 0
    """Its random numbers have the call's seed plus this."""

    serving: str = ""
    """The direction whose plane serves all products; "" if each direction has its own."""

    @staticmethod
    def of(quantizer: Quantizer, context: QuantizeContext, stream: int) -> "HeadOperand":
        """Only one plane is encoded if the plane of the transpose would have the same values."""
        return HeadOperand(quantizer, context, stream, "rowwise" if quantizer.derives_columnwise else "")

    def usage(self, usage: Usage) -> Usage:
        """The planes that are encoded for a `usage`."""
        return Usage(self.serving == "rowwise", self.serving == "columnwise") if self.serving else usage

    def directions(self, usage: Usage) -> list[str]:
        """The names of these planes, in the order of `encode`."""
        return [name for name, is_used in self.usage(usage)._asdict().items() if is_used]

    @property
    def may_share(self) -> bool:
        """Whether a plane may share the memory of heads that are not quantized."""
        return IDENTITY in (self.quantizer.rowwise, self.quantizer.columnwise)

    @property
    def is_whole(self) -> bool:
        """Whether scales cover the whole tensor. Then heads may keep the memory order of the projections."""
        fmts = self.quantizer.rowwise or IDENTITY, self.quantizer.columnwise or IDENTITY
        return all(fmt.block == TENSOR for fmt in fmts)

    def encode(self, x: Tensor, usage: Usage, seed: Tensor | None) -> list[Plane]:
        """The planes of `x` (batch, groups, heads, tokens, width) that `usage` names, rowwise first."""
        context = self.context.with_seed(None if seed is None else seed + self.stream)
        rowwise, columnwise = usage = self.usage(usage)
        if self.is_whole:
            matrix = x.permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1)
            # A kernel writes the transpose directly, but not beside a plane in high precision.
            apart = self.quantizer.rowwise == IDENTITY and columnwise
            usages = [Usage(rowwise, False), Usage(False, True)] if apart else [usage]
            encoded = [plane for each in usages for plane in self.quantizer.encode(matrix, each, context)]
            return [plane for plane in encoded if plane is not None]
        row, col = self.quantizer.rowwise or IDENTITY, self.quantizer.columnwise or IDENTITY
        planes: list[Plane] = []
        follows = columnwise and self.quantizer.columnwise_source != "original"
        if rowwise or follows:
            plane = encode_plane(row, as_rows(x, row), context)
            planes += [plane] if rowwise else []
            x = as_heads(plane, x.shape).to(x.dtype) if follows else x
        if columnwise:
            planes.append(encode_plane(col, as_rows(x.mT, col), context, "col"))
        return planes

    def reuse(self, x: QuantizedTensor, to_heads: Callable[[Tensor], Tensor], usage: Usage) -> list[Plane] | None:
        """The planes of a quantized tensor, in this order of heads; None if it has no plane in the operand's format.

        `to_heads` turns codes of its shape to (batch, heads, tokens, width).
        """
        fmt = self.quantizer.rowwise
        if fmt is None or fmt.is_delayed or not (self.quantizer.derives_columnwise and self.is_whole):
            return None
        plane = x.planes.rowwise
        if plane is None or plane.format != fmt:
            return None
        heads = to_heads(plane.parts["codes"].reshape(x.shape)).transpose(1, 2)
        matrix = heads.flatten(0, 1).flatten(1)
        row = Plane(fmt, {**plane.parts, "codes": matrix}, (matrix.shape[0], matrix.shape[1]))
        rowwise, columnwise = self.usage(usage)
        col = row.transposed() if columnwise else None
        return [each for each in (row if rowwise else None, col) if each is not None]


class EncodedHeads(NamedTuple):
    """The planes of an operand by direction, and the shape of its heads."""

    operand: HeadOperand
    planes: dict[str, Plane]
    shape: tuple[int, ...]

    def values(self, direction: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values of a direction, in `shape`, as a product multiplies them."""
        direction = self.operand.serving or direction
        plane = self.planes[direction]
        batch, groups, heads, tokens, width = self.shape
        if self.operand.is_whole:
            values = plane.dequantize(dtype)
            values = values if direction == "rowwise" else values.t()
            return values.reshape(batch, tokens, groups, heads, width).permute(0, 2, 3, 1, 4)
        if direction == "rowwise":
            return as_heads(plane, self.shape).to(dtype)
        return as_heads(plane, (batch, groups, heads, width, tokens)).mT.to(dtype)

    @property
    def both(self) -> tuple[Tensor, Tensor]:
        """The fp32 values for products over the width of heads, and for products over their tokens."""
        return self.values("rowwise"), self.values("columnwise")

    def rows(self, dtype: torch.dtype) -> Tensor:
        """The values of the first plane, with contiguous rows if codes, of half the bytes, can be transposed."""
        direction = self.operand.serving or next(iter(self.planes))
        turned = self.planes[direction].transposed() if self.operand.is_whole and direction == "columnwise" else None
        if turned is None or turned.format == IDENTITY:
            return self.values(direction, dtype)
        parts = {**turned.parts, "codes": contiguous_rows(turned.parts["codes"].view(torch.uint8))}
        row = Plane(turned.format, parts, turned.shape)
        operand = replace(self.operand, serving="")
        return EncodedHeads(operand, {"rowwise": row}, self.shape).values("rowwise", dtype)


def _padded(rows: int, fmt: Format) -> int:
    step = fmt.alignment[0]
    return -(-rows // step) * step


def as_rows(x: Tensor, fmt: Format) -> Tensor:
    """(*lead, M, K) -> (lead M, K). Rows of zeros follow each M if blocks would reach into the next one."""
    missing = _padded(x.shape[-2], fmt) - x.shape[-2]
    return (F.pad(x, (0, 0, 0, missing)) if missing else x).flatten(0, -2)


def as_heads(plane: Plane, shape: Sequence[int]) -> Tensor:
    """The values of a plane of `as_rows`, fp32 in `shape` (*lead, M, K)."""
    *lead, rows, cols = shape
    values = plane.dequantize(torch.float32)
    return values.reshape(*lead, _padded(rows, plane.format), cols)[..., :rows, :]


@dataclass(frozen=True)
class TileOperand:
    """How probabilities, or their gradients, become operands while they exist: tile by tile.

    The amax of the whole tensor is never known. With a `limit`, a bound of all elements, the scale is the largest power
    of two that does not overflow. Without a limit each tile of 128 x 128 has the scale of its amax. A delayed scale is
    an argument of the call.
    """

    quantizer: Quantizer
    context: QuantizeContext
    limit: float | None = None
    stream: int = 0

    @property
    def is_new(self) -> bool:
        """Whether a delayed direction takes its scale from the first tensor."""
        return any(slot is not None and slot.is_new for slot in self.context.slots)

    def start(self, amaxes: Tensor) -> None:
        """Tell delayed directions the amaxes of all tiles before the first of them is encoded."""
        for slot in self.context.slots:
            if slot is not None and amaxes.numel():
                slot.scale_for(amaxes[None])

    def rounded(
        self, x: Tensor, direction: str, like: torch.dtype, scale: Tensor | None, seed: Tensor | None
    ) -> Tensor:
        """fp32 (*lead, M, K) -> the values that a product over K multiplies, fp32. `like` is the high-precision dtype.

        `scale` is the scale of a delayed format, fp32 (1,).
        """
        fmt = getattr(self.quantizer, direction) or IDENTITY
        if fmt == IDENTITY:
            return x.to(like).float()
        if fmt.block != TENSOR:
            scale = None
        elif scale is None and self.limit is not None:
            scale = x.new_full((1,), 2.0 ** math.floor(math.log2(fmt.largest / self.limit)))
        elif scale is None:
            fmt = fmt.tiled(TILE, TILE)
        matrix = as_rows(x, fmt)
        seed = None if seed is None else seed + self.stream
        stages, propagate = stages_for(matrix), self.context.propagate
        parts = fmt.encode(matrix, scale=scale, seed=seed, plane=direction[:3], stages=stages, propagate=propagate)
        return as_heads(Plane(fmt, parts, (matrix.shape[0], matrix.shape[1])), x.shape)

    def both(self, x: Tensor, like: torch.dtype, seed: Tensor | None) -> tuple[Tensor, Tensor]:
        """fp32 (*lead, M, K) -> the values for products over K, and (*lead, K, M) those for products over M."""
        flat = x.reshape(-1, x.shape[-1])
        scales = [None if slot is None else slot.scale_for(flat) for slot in self.context.slots]
        row = self.rounded(x, "rowwise", like, scales[0], seed)
        if self.quantizer.rowwise == self.quantizer.columnwise and (self.quantizer.rowwise or IDENTITY).is_derivable:
            return row, row.mT
        return row, self.rounded(x.mT, "columnwise", like, scales[1], seed)
