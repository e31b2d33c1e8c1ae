"""The op table of QuantizedTensor: operations that keep planes, or move and copy them byte for byte.

docs/tensors.md lists what gives a plain tensor instead.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload

from duotone.errors import MissingPlaneError, UserError
from duotone.formats.format import require_dense
from duotone.tensor.plane import Plane, Planes
from duotone.tensor.plane_tensor import (
    HIGH_PRECISION_DTYPES,
    is_entry,
    mark_entry,
    matrix_shape,
    plain,
    values_as,
)
from duotone.tensor.quantized import OPS, QuantizedTensor, view_of

aten = torch.ops.aten
F = TypeVar("F", bound=Callable[..., object])


def _op(*functions: OpOverload) -> Callable[[F], F]:
    def add(implementation: F) -> F:
        for function in functions:
            OPS[function] = implementation
        return implementation

    return add


@_op(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def _detach(t: QuantizedTensor) -> QuantizedTensor:
    return t.with_planes(t.planes)


@_op(aten.clone.default)
def _clone(t: QuantizedTensor, memory_format: object = None) -> QuantizedTensor:
    copy = t.with_planes(t.planes.map(torch.clone), is_piece=False)
    copy.context = t.context.without_slots()
    return copy


@_op(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(t: QuantizedTensor, shape: Sequence[int]) -> QuantizedTensor:
    return t.with_planes(t.planes, torch.empty(t.shape, device="meta").view(shape).shape)


@_op(aten.expand.default)
def _expand(t: QuantizedTensor, size: Sequence[int], implicit: bool = False) -> Tensor:
    return _detach(t) if list(size) == list(t.shape) else view_of(t, aten.expand.default, size)


@_op(aten._to_copy.default)
def _to_copy(
    t: QuantizedTensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    pin_memory: bool | None = None,
    **layout: object,
) -> Tensor:
    copy = partial(aten._to_copy.default, device=device, non_blocking=non_blocking, pin_memory=pin_memory)
    if dtype is not None and dtype != t.dtype:
        return copy(values_as(t, dtype), dtype=dtype, **layout)
    moved = t.with_planes(t.planes.map(copy), device=device, is_piece=False)
    moved.gathers = t.gathers  # FSDP2 gathers from a copy of a shard that waits on the CPU
    if device is None or device == t.device:  # a weight that moves stays itself
        moved.context = t.context.without_slots()
    if is_entry(t):
        mark_entry(moved)
    return moved


@_op(aten.copy_.default)
def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, QuantizedTensor):
        values = values_as(source, target.dtype) if isinstance(source, QuantizedTensor) else source
        return target.copy_(values, non_blocking)
    target.require_writable()
    if not isinstance(source, QuantizedTensor) or source.shape != target.shape:
        values = plain(source)
        require_dense("a quantized tensor", values)
        if values.dtype not in HIGH_PRECISION_DTYPES:
            values = values.to(torch.float32)
        sizes = zip(values.shape[::-1], target.shape[::-1], strict=False)
        expands = values.dim() <= target.dim() and all(size in (1, extent) for size, extent in sizes)
        return target.quantize_(values.expand(target.shape) if expands else values)
    alike = _with_usages_of(source, target)
    if alike.formats != target.formats or alike.matrix_shape != target.matrix_shape:
        return target.quantize_(source)
    target.planes.copy_(alike.planes)
    target.count_write()
    target.fit_slots()
    return target


@_op(aten._foreach_copy_.default)
def _foreach_copy(targets: Sequence[Tensor], sources: Sequence[Tensor], non_blocking: bool = False) -> None:
    for target in targets:
        if isinstance(target, QuantizedTensor):
            target.require_writable()
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking)


def _with_usages_of(source: QuantizedTensor, target: QuantizedTensor) -> QuantizedTensor:
    """The source with just the planes of the target, derived without loss; the source itself if one cannot be.

    Raises MissingPlaneError, before any write, if the target holds two formats and the source lacks one of them.
    """
    alike = source.with_planes(source.planes)
    try:
        alike.update_usage(**target.get_usages())
    except MissingPlaneError:
        row, col = target.formats
        if row is not None and col is not None and row != col:
            raise
        return source
    return alike


@_op(aten.slice.Tensor)
def _slice(t: QuantizedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    extent = t.shape[dim]
    first, last, _ = slice(start, end).indices(extent)
    if step == 1 and (first, max(first, last)) == (0, extent):
        return _detach(t)
    piece = _narrow(t, dim % t.dim(), first, max(first, last)) if step == 1 else None
    return view_of(t, aten.slice.Tensor, dim, start, end, step) if piece is None else piece


@_op(aten.select.int)
def _select(t: QuantizedTensor, dim: int, index: int) -> Tensor:
    extent = t.shape[dim]
    at = index % extent if -extent <= index < extent else index
    piece = _narrow(t, 0, at, at + 1) if dim % t.dim() == 0 and t.dim() > 1 and 0 <= at < extent else None
    return view_of(t, aten.select.int, dim, index) if piece is None else _view(piece, t.shape[1:])


@_op(aten.unbind.int)
def _unbind(t: QuantizedTensor, dim: int = 0) -> list[Tensor]:
    return [_select(t, dim, index) for index in range(t.shape[dim])]


@_op(aten.split.Tensor)
def _split(t: QuantizedTensor, size: int, dim: int = 0) -> list[Tensor]:
    extent = t.shape[dim]
    if size <= 0:
        return list(view_of(t, aten.split.Tensor, size, dim))
    return _split_with_sizes(t, [min(size, extent - at) for at in range(0, extent, size)] or [0], dim)


@_op(aten.split_with_sizes.default)
def _split_with_sizes(t: QuantizedTensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    if sum(sizes) != t.shape[dim]:
        return list(view_of(t, aten.split_with_sizes.default, sizes, dim))
    pieces: list[Tensor | None] = []
    dim, at = dim % t.dim(), 0
    for size in sizes:
        pieces.append(_narrow(t, dim, at, at + size))
        at += size
    views = [piece for piece in pieces if piece is not None]
    if len(views) == len(pieces):
        return views
    if dim == 0 and t.dim() > 1:
        names = " and ".join(fmt.name for fmt in t.formats if fmt is not None)
        raise MissingPlaneError(
            f"pieces of {list(sizes)} rows cut the blocks of {names}; split at multiples of {_row_step(t)} rows, or "
            "dequantize() first"
        )
    return list(view_of(t, aten.split_with_sizes.default, sizes, dim))


def _row_step(t: QuantizedTensor) -> int:
    """A split of the first dimension at multiples of this cuts no block of a plane."""
    row, col = t.planes
    step = math.lcm(row.format.alignment[0] if row else 1, col.format.alignment[1] if col else 1)
    return step // math.gcd(step, t.matrix_shape[0] // t.shape[0])


def _narrow(t: QuantizedTensor, dim: int, start: int, stop: int) -> QuantizedTensor | None:
    """A view of a range along the first or the last dimension, None if it cuts a block."""
    if matrix_shape(t.shape) != t.matrix_shape or dim not in (0, t.dim() - 1):
        return None
    rows = dim == 0 and t.dim() > 1
    factor = t.matrix_shape[0] // t.shape[0] if rows and t.shape[0] else 1
    row, col = t.planes
    ends = (start * factor, stop * factor)
    cut_row = row and row.narrow(0 if rows else 1, *ends)
    cut_col = col and col.narrow(1 if rows else 0, *ends)
    if (row is not None and cut_row is None) or (col is not None and cut_col is None):
        return None
    shape = list(t.shape)
    shape[dim] = stop - start
    piece = t.with_planes(Planes(cut_row, cut_col), torch.Size(shape))
    piece.is_piece = True
    return piece


@_op(aten.as_strided.default)
def _as_strided(
    t: QuantizedTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    if t.is_piece and storage_offset is not None:
        raise UserError(
            "as_strided of a piece of a quantized tensor takes no storage_offset, which torch counts from the start of "
            "the whole tensor; call as_strided of the whole"
        )
    offset = storage_offset or 0
    if (list(size), list(stride), offset) == (list(t.shape), list(t.stride()), 0):
        return _detach(t)
    if list(stride) == list(t.stride()) and list(size[1:]) == list(t.shape[1:]) and t.dim() > 1:
        start, remainder = divmod(offset, stride[0]) if stride[0] else (0, 1)
        if remainder == 0 and start + size[0] <= t.shape[0]:
            piece = _slice(t, 0, start, start + size[0])
            if isinstance(piece, QuantizedTensor):
                return piece
    return view_of(t, aten.as_strided.default, size, stride, storage_offset)


def _like(
    t: QuantizedTensor,
    size: Sequence[int],
    *,
    make: Callable[..., Tensor],
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    **layout: object,
) -> Tensor:
    """A tensor of another size with the planes that `t` holds, over buffers from `make`. The layout is ignored."""
    dtype, device = dtype or t.dtype, torch.device(device or t.device)
    new = partial(make, device=device, pin_memory=pin_memory or False)
    if dtype not in HIGH_PRECISION_DTYPES:
        return new(tuple(size), dtype=dtype)
    if t.planes == (None, None):
        raise MissingPlaneError(f"{t!r} holds no plane, so nothing like it can be made; make it with its quantizer")
    shape = torch.Size(size)
    rows, cols = t.matrix_shape if shape == t.shape else matrix_shape(shape)
    row, col = t.formats
    row_plane = row and Plane.empty(row, (rows, cols), new, dtype)
    if row_plane is not None and t.planes.aliased:
        col_plane = row_plane.transposed()
    else:
        col_plane = col and Plane.empty(col, (cols, rows), new, dtype, "col")
    return t.with_planes(Planes(row_plane, col_plane), shape, dtype=dtype, device=device, is_piece=False)


def _blank(t: QuantizedTensor, size: Sequence[int], **options: Any) -> Tensor:
    blank = _like(t, size, make=torch.empty, **options)
    if isinstance(blank, QuantizedTensor):
        blank.context, blank.is_blank = t.context.without_slots(), True
    return blank


@_op(aten.new_zeros.default)
def _new_zeros(t: QuantizedTensor, size: Sequence[int], **options: Any) -> Tensor:
    """FSDP2 creates shards by this. Nobody multiplies them, so a columnwise plane is a view if possible."""
    zeros = _like(t, size, make=torch.zeros, **options)
    if isinstance(zeros, QuantizedTensor):
        zeros.context = t.context.without_slots()  # a module gives its shard the slots of the weight
    if isinstance(zeros, QuantizedTensor) and zeros.derives_columnwise:
        col = zeros.planes.rowwise and zeros.planes.rowwise.transposed()
        zeros._columnwise = col if Planes(zeros._rowwise, col).aliased else zeros._columnwise
    return zeros


OPS[aten.new_empty.default] = _blank


@_op(aten.empty_like.default)
def _empty_like(t: QuantizedTensor, **options: Any) -> Tensor:
    return _blank(t, t.shape, **options)


@_op(aten.is_pinned.default)
def _is_pinned(t: QuantizedTensor, device: object = None) -> bool:
    return any(part.is_pinned() for part in t.parts)


@_op(aten._pin_memory.default)
def _pin_memory(t: QuantizedTensor, device: object = None) -> QuantizedTensor:
    return t.with_planes(t.planes.map(lambda part: part.pin_memory()), is_piece=False)


@_op(aten.record_stream.default)
def _record_stream(t: QuantizedTensor, stream: torch.Stream) -> None:
    for part in t.parts:
        part.record_stream(stream)
