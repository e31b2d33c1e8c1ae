"""Casts of quantized tensors in a graph, as of a compiled optimizer step: one op, which runs the eager cast.

Inductor's code for two planes of one matrix on a CPU fails for some shapes (torch 2.11 and 2.13).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from duotone.formats import Format, get
from duotone.graph_ops import define_op
from duotone.tensor.context import FixedScale, QuantizeContext
from duotone.tensor.plane import Plane, Planes, Usage
from duotone.tensor.plane_encoder import PlaneEncoder


def delayed_scales(
    quantizer: PlaneEncoder, x: Tensor, usage: Usage, ctx: QuantizeContext
) -> tuple[Tensor | None, Tensor | None]:
    """The scales that the slots of a context give to the planes that `usage` names."""
    row, col = quantizer.rowwise, quantizer.columnwise
    first, second = ctx.slots
    wants_row = usage.rowwise and row is not None and row.is_delayed
    wants_col = usage.columnwise and col is not None and col.is_delayed
    of_row = first.scale_for(x) if first is not None and (wants_row or (wants_col and second is None)) else None
    return of_row, second.scale_for(x) if second is not None and wants_col else None


def fixed(*scales: Tensor | None) -> tuple[FixedScale | None, FixedScale | None]:
    """Slots that give these scales and record nothing."""
    row, col = (None if scale is None else FixedScale(scale) for scale in scales)
    return row, col


def encoded(quantizer: PlaneEncoder, x: Tensor, usage: Usage, ctx: QuantizeContext) -> Planes:
    """What the quantizer encodes, in a trace by one op, unless the graph has to see collectives or unknown formats."""
    formats, traces = (quantizer.rowwise, quantizer.columnwise), isinstance(x, FunctionalTensor)
    if not traces or _shards_agree(formats, ctx) or not quantizer.is_plain or not all(map(_is_registered, formats)):
        return quantizer.encode(x, usage, ctx)
    row, col = (fmt.name if fmt is not None else "" for fmt in formats)
    tensors = *delayed_scales(quantizer, x, usage, ctx), ctx.seed
    options = quantizer.columnwise_source, ctx.propagate, ctx.nominal or x.dtype
    parts = torch.ops.duotone.encode_planes(x, row, col, usage, *options, tensors)
    of_row, of_col = (fmt if wants else None for fmt, wants in zip(formats, usage, strict=True))
    return Planes.of(of_row, of_col, parts, x.shape)


def _shards_agree(formats: Sequence[Format | None], ctx: QuantizeContext) -> bool:
    """Whether an encode of both planes asks other ranks for an amax."""
    shard = ctx.shard
    dims = () if shard is None else (shard.dim, 1 - shard.dim)
    return any(fmt is not None and fmt.spans(dim) for fmt, dim in zip(formats, dims, strict=False))


def _is_registered(fmt: Format | None) -> bool:
    return fmt is None or get(fmt.name) is fmt


def _encode_planes(
    x: Tensor,
    row: str,
    col: str,
    usage: Sequence[bool],
    source: str,
    propagate: bool,
    nominal: torch.dtype,
    tensors: Sequence[Tensor | None],
) -> list[Tensor]:
    """The parts of the planes that are wanted, in the memory order of `Plane.empty`. They share no memory.

    `tensors` are the delayed scales of both planes and the seed.
    """
    of_row, of_col, seed = tensors
    quantizer = PlaneEncoder((row and get(row)) or None, (col and get(col)) or None, source)
    ctx = QuantizeContext(None, fixed(of_row, of_col), seed, propagate=propagate, nominal=nominal)
    parts = quantizer.encode(x, Usage(*usage), ctx).buffers
    return [new.copy_(part) for new, part in zip(_empty_planes(x, row, col, usage), parts, strict=True)]


def _empty_planes(x: Tensor, row: str, col: str, usage: Sequence[bool], *_: object) -> list[Tensor]:
    rows, cols = x.shape
    of_row = Plane.empty(get(row), (rows, cols), x.new_empty, x.dtype) if row and usage[0] else None
    of_col = Plane.empty(get(col), (cols, rows), x.new_empty, x.dtype, "col") if col and usage[1] else None
    return [*Planes(of_row, of_col).buffers]


define_op(
    "encode_planes(Tensor x, str row, str col, bool[] wanted, str source, bool propagate, ScalarType nominal, "
    "Tensor?[] tensors) -> Tensor[]",
    _encode_planes,
    _empty_planes,
)
