"""Products and casts of a matrix whose row segments belong to different linears, where native kernels do both.

Segments whose rows the host knows are multiplied by one cuBLAS product each; those that only the device knows, and
those of small weights, by a kernel that takes all of them.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from duotone.dispatch.capability import HOPPER, capability
from duotone.dispatch.casts import PLAIN_TYPES, has_kernels, one_read
from duotone.dispatch.cuda import DTYPES
from duotone.dispatch.products import put
from duotone.dispatch.scaled import STEP, ScaledProduct, cublas_writes, dtype_of_product
from duotone.formats import Format

MOST = 1024
"""Segments at most: kernels look at them at once."""

SMALL = 1 << 24
"""Elements of a weight up to which products of rows that the host knows are grouped too: one launch, instead of one for
each segment, is then worth more than cuBLAS's faster slow accumulation. Measured, see docs/hopper.md."""

CHUNK = 128
"""Columns of codes that a segment takes a multiple of in grouped products."""

_CASTS: dict[tuple[int, int, torch.dtype, bool, bool], Any] = {}
_PRODUCTS: dict[tuple[bool, bool], Any] = {}
_HELD: dict[Any, Tensor] = {}
REMEMBERED = 4096


def takes_segments(gemms: Sequence[Any], shape: tuple[int, ...]) -> bool:
    """Whether products of these GEMM plans over weights (N, K) can be made segment by segment."""
    if any(n % STEP or n == 0 for n in shape):
        return False
    return all(
        isinstance(gemm.rule, ScaledProduct) and gemm.a.outer_block.rows == gemm.b.outer_block.rows for gemm in gemms
    )


def takes_all_segments(count: int) -> bool:
    """Whether the grouped product multiplies so many segments that `takes_segments`; it was checked on Hopper alone."""
    return capability() == HOPPER and count <= MOST


def width(rows: int, multiple: int = STEP) -> int:
    """Columns of codes that a segment of so many rows takes, the last ones zeros."""
    return -(-rows // multiple) * multiple


def are_real(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether kernels take the tensors as they are: no compiler traces, none is fake or elsewhere, x is not empty."""
    if torch.compiler.is_compiling() or not has_kernels(x) or weights[0].device != x.device:
        return False
    return all([type(w) in PLAIN_TYPES for w in weights])


def segment_cast(row: Format | None, col: Format | None, x: Tensor, whole: bool, propagate: bool = True) -> Any:
    """The `duotone.kernels.segment_cast.SegmentCast` to these planes of a matrix like `x`."""
    key = (id(row), id(col), x.dtype, whole, propagate)
    found = _CASTS.get(key)
    if found is None:
        from duotone.kernels.segment_cast import SegmentCast

        found = _CASTS[key] = SegmentCast(one_read(row, col, x, propagate), whole)  # `one_read` holds the formats
    return found


def host_segments(counts: Sequence[int], like: Tensor, multiple: int = STEP) -> Any:
    """Segments of so many rows each, known to the host, of which each takes a multiple of columns of codes."""
    from duotone.kernels.segment_cast import Segments

    ends = tuple(itertools.accumulate(counts))
    wide = tuple(itertools.accumulate([width(n, multiple) for n in counts]))
    return Segments(_on_device((*ends, *wide), torch.int32, like.device), len(counts), ends[-1], wide[-1])


def device_segments(counts: Tensor, like: Tensor) -> Any:
    """Segments of a matrix like `like` whose rows only the device knows, for grouped products."""
    from duotone.kernels.segment_cast import segments_of

    return segments_of(counts.to(like.device, non_blocking=True), like.shape[0])


def equal_segments(rows: int, count: int, like: Tensor) -> Any:
    """Segments of the same number of rows, a multiple of 16."""
    from duotone.kernels.segment_cast import Segments

    ends = tuple(range(rows, rows * count + 1, rows))
    return Segments(_held((*ends, *ends), torch.int32, like.device), count, rows * count, rows * count)


def table(tensors: Sequence[Tensor]) -> Any:
    """Where the tensors lie, from the first."""
    from duotone.kernels.segment_cast import Table

    first = tensors[0]
    base, size = first.data_ptr(), first.itemsize
    offsets = tuple([(t.data_ptr() - base) // size for t in tensors])
    return Table(_held(offsets, torch.int64, first.device), not any([n % STEP for n in offsets]))


def _held(values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As `_on_device`, kept for the next call on the same stream; a graph that captures keeps tensors of its own."""
    if torch.cuda.is_current_stream_capturing():
        return _on_device(values, dtype, device)
    key = (values, dtype, device.index, torch.cuda.current_stream(device).cuda_stream)
    found = _HELD.get(key)
    if found is None:
        if len(_HELD) >= REMEMBERED:
            _HELD.clear()
        found = _HELD[key] = _on_device(values, dtype, device)
    return found


def _on_device(values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Integers on the device, without waiting for it: the driver stages what is copied from pageable memory."""
    if torch.cuda.is_current_stream_capturing():  # where such a copy is refused
        return torch.stack([torch.full((), n, dtype=dtype, device=device) for n in values])
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def product(
    left: Tensor,
    right: Tensor,
    of_left: Tensor,
    of_right: Tensor,
    fast: bool,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """FP8 codes (M, K) and (K, N), contraction next to each other, as `ScaledProduct` multiplies them.

    Into `out` (M, N) or a new one in `dtype`. Scales are both of one element, or (M, 1) and (1, N).
    """
    dtype = out.dtype if out is not None else dtype
    assert dtype is not None
    if not left.shape[1]:
        return torch.zeros((left.shape[0], right.shape[1]), dtype=dtype, device=left.device)
    per_row = of_left.numel() > 1 or of_right.numel() > 1
    if dtype_of_product(dtype, per_row) is not dtype or not (bias is None or dtype is bias.dtype is torch.bfloat16):
        y = torch._scaled_mm(  # type: ignore[reportPrivateImportUsage]
            left, right, of_left, of_right, out_dtype=dtype_of_product(torch.float32, per_row), use_fast_accum=fast
        )
        y = y if bias is None else y + bias.to(torch.float32)
        return y.to(dtype) if out is None else out.copy_(y)
    given = {} if out is None else {"out": out}
    return torch._scaled_mm(  # type: ignore[reportPrivateImportUsage]
        left, right, of_left, of_right, bias=bias, out_dtype=dtype, use_fast_accum=fast, **given
    )


def product_into(
    left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor, fast: bool, out: Tensor, adds: bool
) -> None:
    """As `product`, written over `out` (M, N) in any of torch's dtypes or, `adds`, added to it."""
    if left.shape[1] and cublas_writes(left, out):
        from duotone.kernels.cublas import Side, multiply

        kind = "tensor" if of_left.numel() == of_right.numel() == 1 else "row"
        if multiply(Side(left, of_left, kind), Side(right.t(), of_right, kind), out, fast, adds):
            return
    made = product(left, right, of_left, of_right, fast, dtype=out.dtype if out.dtype in DTYPES else torch.float32)
    put(made, out, adds)


Place = tuple[Tensor, bool]
"""Where a product goes, and whether it is added to what is there."""


def columns_into(multiply: Any, given: tuple[Any, ...], places: Sequence[Place | None]) -> list[Tensor | None]:
    """The columnwise product of a `GroupedProduct`, each segment's in its place, if it has one.

    The product itself, (M, N), of those whose place the kernel cannot take, or has taken for another segment.
    """
    dtypes = [place[0].dtype for place in places if place is not None]
    dtype = torch.float32 if torch.float32 in dtypes else next((one for one in dtypes if one in DTYPES), torch.float32)
    first: dict[int, int] = {}
    for i, place in enumerate(places):
        if place is not None and _takes(given[0], place[0], dtype):
            first.setdefault(place[0].data_ptr(), i)
    if not first:
        return list(multiply.of_columns(*given, torch.float32).unbind(0))
    taken: dict[int, Any] = {i: places[i] for i in first.values()}
    own = functools.partial(torch.empty, given[0].shape[0], given[1].shape[0], dtype=dtype, device=given[0].device)
    nowhere = own() if None in places else None  # of all without a place
    adds, outs = any(add for _, add in taken.values()), []
    for i, place in enumerate(places):
        if place is None:
            outs.append(nowhere)
        else:
            out, add = taken[i] if i in taken else (own(), False)
            outs.append(out if add or not adds else out.zero_())
    multiply.of_columns_into(*given, outs[0], table(outs), adds)
    return [None if i in taken else out for i, out in enumerate(outs)]


def _takes(like: Tensor, out: Tensor, dtype: torch.dtype) -> bool:
    """Whether the grouped product of operands like this one writes over a result (M, N) in `dtype`, or adds to it."""
    return out.dtype is dtype and out.device == like.device and out.is_contiguous() and type(out) in PLAIN_TYPES


def stacked(biases: Sequence[Tensor | None], length: int) -> Tensor | None:
    """(E, N) of all biases (N,), zeros where one is None; None where all are."""
    given = next((bias for bias in biases if bias is not None), None)
    if given is None:
        return None
    return torch.stack([given.new_zeros(length) if bias is None else bias for bias in biases])


def row_sums(x: Tensor, segments: Any) -> Tensor:
    """(E, N) sums over the rows of each segment of contiguous (M, N)."""
    from duotone.kernels.grouped import sums

    return sums(x, segments)


def grouped_product(fast: bool, lines: bool) -> Any:
    """The `duotone.kernels.grouped.GroupedProduct` with scales per row (`lines`) or per segment."""
    found = _PRODUCTS.get((fast, lines))
    if found is None:
        from duotone.kernels.grouped import GroupedProduct

        found = _PRODUCTS[fast, lines] = GroupedProduct(fast, lines)
    return found
