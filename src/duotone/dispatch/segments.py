"""Products and casts of a matrix whose row segments belong to different linears, where native kernels do both.

Segments whose rows the host knows are multiplied by one cuBLAS product each; those that only the device knows, by
torch's grouped product, which takes E4M3 with scales per row and gives bf16.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from duotone.dispatch.capability import capability
from duotone.dispatch.casts import PLAIN_TYPES, has_kernels, one_read
from duotone.dispatch.scaled import STEP, ScaledProduct
from duotone.formats import Format

E4M3 = torch.float8_e4m3fn
GROUPED_ON = (9, 0)
"""The compute capability on which torch's grouped FP8 product was checked; newer ones launch other kernels."""

MOST = 1024
"""Segments at most: the grouped product looks at them in one block of threads."""

_CASTS: dict[tuple[int, int, torch.dtype, bool, bool], Any] = {}
_HELD: dict[Any, Tensor] = {}
REMEMBERED = 4096


def takes_segments(gemms: Sequence[Any], shape: tuple[int, ...]) -> bool:
    """Whether products of these GEMM plans over weights (N, K) can be made segment by segment."""
    if any(n % STEP or n == 0 for n in shape):
        return False
    return all(
        isinstance(gemm.rule, ScaledProduct) and gemm.a.outer_block.rows == gemm.b.outer_block.rows for gemm in gemms
    )


def takes_device_segments(gemms: Sequence[Any], count: int) -> bool:
    """Whether torch's grouped product multiplies them."""
    if capability() != GROUPED_ON or count > MOST or not hasattr(torch, "_scaled_grouped_mm"):
        return False
    return all(gemm.a.code_dtype is gemm.b.code_dtype is E4M3 for gemm in gemms)


def width(rows: int) -> int:
    """Columns of codes that a segment of so many rows takes: a multiple of 16, the last ones zeros."""
    return -(-rows // STEP) * STEP


def are_real(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether kernels take the tensors as they are: no compiler traces, none is fake, and x is not empty."""
    if torch.compiler.is_compiling() or not has_kernels(x):
        return False
    return all([type(w) in PLAIN_TYPES for w in weights])


def segment_cast(row: Format | None, col: Format | None, x: Tensor, whole: bool, spread: bool) -> Any:
    """The `duotone.kernels.segment_cast.SegmentCast` to these planes of a matrix like `x`."""
    key = (id(row), id(col), x.dtype, whole, spread)
    found = _CASTS.get(key)
    if found is None:
        from duotone.kernels.segment_cast import SegmentCast

        found = _CASTS[key] = SegmentCast(one_read(row, col, x), whole, spread)  # `one_read` holds the formats
    return found


def host_segments(counts: Sequence[int], like: Tensor) -> Any:
    """Segments of so many rows each, known to the host."""
    from duotone.kernels.segment_cast import Segments

    ends = tuple(itertools.accumulate(counts))
    wide = tuple(itertools.accumulate(map(width, counts)))
    return Segments(_on_device((*ends, *wide), torch.int32, like.device), len(counts), ends[-1], wide[-1])


def device_segments(counts: Tensor, like: Tensor) -> Any:
    """Segments of a matrix like `like` whose rows only the device knows."""
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
    """As `_on_device`, kept for the next call on the same stream."""
    key = (values, dtype, device.index, torch.cuda.current_stream(device).cuda_stream)
    found = _HELD.get(key)
    if found is None:
        found = _on_device(values, dtype, device)
        if not torch.cuda.is_current_stream_capturing():
            if len(_HELD) >= REMEMBERED:
                _HELD.clear()
            _HELD[key] = found
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
    if not left.shape[1]:
        return torch.zeros((left.shape[0], right.shape[1]), dtype=dtype, device=left.device)
    if dtype is torch.float16 or not (bias is None or dtype is bias.dtype is torch.bfloat16):
        y = torch._scaled_mm(  # type: ignore[reportPrivateImportUsage]
            left, right, of_left, of_right, out_dtype=torch.float32, use_fast_accum=fast
        )
        y = y if bias is None else y + bias.to(torch.float32)
        return y.to(dtype) if out is None else out.copy_(y)
    if out is None:
        return torch._scaled_mm(  # type: ignore[reportPrivateImportUsage]
            left, right, of_left, of_right, out_dtype=dtype, use_fast_accum=fast
        )
    return torch._scaled_mm(  # type: ignore[reportPrivateImportUsage]
        left, right, of_left, of_right, bias=bias, out_dtype=dtype, use_fast_accum=fast, out=out
    )


def grouped_product(left: Tensor, right: Tensor, scales: tuple[Tensor, Tensor], ends: Tensor, fast: bool) -> Tensor:
    """bf16 products of segments that end where `ends` says.

    (M, K) by (E, K, N) -> (M, N), with scales (M,) and (E, N); or (N, M) by (M, K) -> (E, N, K), with (E N,) and
    (E K,). The second operand has its contraction next to each other.
    """
    return torch._scaled_grouped_mm(  # type: ignore[reportPrivateImportUsage]
        left, right, *scales, ends, out_dtype=torch.bfloat16, use_fast_accum=fast
    )
