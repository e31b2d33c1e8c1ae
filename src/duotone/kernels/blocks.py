"""Amax, cast and decode of blocked matrices (`duotone.formats.stages`), with any strides in and contiguous rows out.

A matrix (M, K) is cut into blocks of R x C that share a scale; a grid is (ceil(M/R), ceil(K/C)), contiguous. WIDE_R and
WIDE_C say that one block spans all rows, or all columns.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from duotone.kernels.scaling import FP32, HIDES, POWER, encode_scale, exponent, marked, power_of_two, stored_scale

ROWS, COLS = 64, 128
"""Tile of the elementwise kernels; block amaxes take tiles that hold whole blocks."""
WHOLE = 1 << 30


@triton.jit
def _tile(stride_m, stride_k, M, K, TM: tl.constexpr, TK: tl.constexpr):
    """Row and column of each element of this program's tile, its offset in the input, and whether it exists."""
    m = tl.program_id(0) * TM + tl.arange(0, TM)
    k = tl.program_id(1) * TK + tl.arange(0, TK)
    inside = (m[:, None] < M) & (k[None, :] < K)
    # A tile may start beyond 2^31 elements; offsets inside of it stay below.
    start = (tl.program_id(0) * TM).to(tl.int64) * stride_m + (tl.program_id(1) * TK).to(tl.int64) * stride_k
    return m, k, start + (tl.arange(0, TM)[:, None] * stride_m + tl.arange(0, TK)[None, :] * stride_k), inside


@triton.jit
def _magnitude(x, offset, inside, nan):
    """|x| in fp32; NaN counts as `nan`, what is outside as 0."""
    value = tl.abs(tl.load(x + offset, mask=inside, other=0.0).to(tl.float32))
    return tl.where(value == value, value, nan)


@triton.jit
def _scale(scale, m, k, inside, M, GC, R, C, WIDE_R: tl.constexpr, WIDE_C: tl.constexpr):
    """What the elements of a tile are multiplied by: one number, one per row, or one per block."""
    if not WIDE_C:
        given = tl.load(scale + (m[:, None] // R) * GC + k[None, :] // C, mask=inside, other=0.0)
    elif WIDE_R:
        given = tl.load(scale)
    else:
        given = tl.load(scale + m // R * GC, mask=m < M, other=0.0)[:, None]
    return given


@triton.jit
def _to(out, m, k, K):
    """Where a tile goes in a matrix whose rows are contiguous."""
    return out + (m.to(tl.int64)[:, None] * K + k[None, :])


@triton.jit
def block_amax_kernel(
    x, out, stride_m, stride_k, M, K, GC, nan, R: tl.constexpr, C: tl.constexpr, TM: tl.constexpr, TK: tl.constexpr
):
    """max |x| of every R x C block; a tile holds whole blocks."""
    _, _, offset, inside = _tile(stride_m, stride_k, M, K, TM, TK)
    value = tl.reshape(_magnitude(x, offset, inside, nan), [TM // R, R, TK // C, C])
    value = tl.max(tl.max(value, axis=3), axis=1)
    i = tl.program_id(0) * (TM // R) + tl.arange(0, TM // R)
    j = tl.program_id(1) * (TK // C) + tl.arange(0, TK // C)
    tl.store(out + i[:, None] * GC + j[None, :], value, mask=(i[:, None] * R < M) & (j[None, :] < GC))


@triton.jit
def row_amax_kernel(x, out, stride_m, stride_k, M, K, nan, TM: tl.constexpr, TK: tl.constexpr):
    """max |x| of every row into int32 bits that start at 0: magnitudes order like their bits."""
    m, _, offset, inside = _tile(stride_m, stride_k, M, K, TM, TK)
    value = tl.max(_magnitude(x, offset, inside, nan), axis=1)
    tl.atomic_max(out + m, value.to(tl.int32, bitcast=True), mask=m < M)


@triton.jit
def tensor_amax_kernel(x, out, stride_m, stride_k, M, K, nan, TM: tl.constexpr, TK: tl.constexpr):
    """max |x| of the matrix into int32 bits that start at 0."""
    _, _, offset, inside = _tile(stride_m, stride_k, M, K, TM, TK)
    value = tl.max(tl.max(_magnitude(x, offset, inside, nan), axis=1), axis=0)
    tl.atomic_max(out, value.to(tl.int32, bitcast=True))


@triton.jit
def cast_kernel(
    x,
    multiplier,
    out,
    stride_m,
    stride_k,
    M,
    K,
    GC,
    largest,
    R: tl.constexpr,
    C: tl.constexpr,
    WIDE_R: tl.constexpr,
    WIDE_C: tl.constexpr,
    MARKS: tl.constexpr,
    TM: tl.constexpr,
    TK: tl.constexpr,
):
    """codes = round(x * multiplier of the block), saturating, NaN without a sign.

    Where it MARKS, infinities are NaN.
    """
    m, k, offset, inside = _tile(stride_m, stride_k, M, K, TM, TK)
    value = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    if MARKS:
        value = marked(value)
    value = value * _scale(multiplier, m, k, inside, M, GC, R, C, WIDE_R, WIDE_C)
    nan = value != value
    value = tl.where(nan, float("nan"), tl.minimum(tl.maximum(value, -largest), largest))
    tl.store(_to(out, m, k, K), value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def values_kernel(
    codes,
    factor,
    out,
    stride_m,
    stride_k,
    M,
    K,
    GC,
    R: tl.constexpr,
    C: tl.constexpr,
    WIDE_R: tl.constexpr,
    WIDE_C: tl.constexpr,
    TM: tl.constexpr,
    TK: tl.constexpr,
):
    """value(code) * factor of the block, rounded once to the dtype of `out`."""
    m, k, offset, inside = _tile(stride_m, stride_k, M, K, TM, TK)
    value = tl.load(codes + offset, mask=inside, other=0.0).to(tl.float32)
    value = value * _scale(factor, m, k, inside, M, GC, R, C, WIDE_R, WIDE_C)
    tl.store(_to(out, m, k, K), value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def fp32_scale_kernel(amax, scale, stored, N, largest, overflow, epsilon, CODEC: tl.constexpr, T: tl.constexpr):
    """Encode scales largest / amax and their reciprocals."""
    i = tl.program_id(0) * T + tl.arange(0, T)
    value = tl.load(amax + i, mask=i < N, other=1.0)
    zero = tl.zeros([T], tl.float32)  # numbers are no tensors in Triton's interpreter
    made = encode_scale(value, zero + largest, zero + overflow, epsilon, CODEC)
    tl.store(scale + i, made, mask=i < N)
    tl.store(stored + i, stored_scale(value, made, largest, CODEC), mask=i < N)


@triton.jit
def exponent_scale_kernel(amax, code, multiplier, N, reciprocal, T: tl.constexpr):
    """E8M0 bytes of amax * reciprocal rounded up to a power of two, and 2^(127 - byte)."""
    i = tl.program_id(0) * T + tl.arange(0, T)
    made = exponent(tl.load(amax + i, mask=i < N, other=1.0), reciprocal, True)
    tl.store(code + i, made.to(tl.uint8), mask=i < N)
    tl.store(multiplier + i, power_of_two(254 - made), mask=i < N)


@triton.jit
def rows_kernel(x, out, stride_m, stride_k, M, K, TM: tl.constexpr, TK: tl.constexpr):
    """The bytes of a strided matrix."""
    m, k, offset, inside = _tile(stride_m, stride_k, M, K, TM, TK)
    tl.store(_to(out, m, k, K), tl.load(x + offset, mask=inside), mask=inside)


def block_amax(x: Tensor, rows: int, cols: int, nan: float = 0.0) -> Tensor:
    """fp32 grid of max |x| of (M, K) over blocks of rows x cols; 0 means the whole extent, and then rows is 0 or 1.

    NaN counts as `nan`.
    """
    m, k = x.shape
    if cols == 0:
        bits = torch.zeros((m if rows else 1, 1), dtype=torch.int32, device=x.device)
        kernel = row_amax_kernel if rows else tensor_amax_kernel
        kernel[_grid(m, k, ROWS, COLS)](x, bits, *x.stride(), m, k, nan, TM=ROWS, TK=COLS)
        return bits.view(torch.float32)
    across, height, width = -(-k // cols), max(rows, 32), max(cols, COLS)
    out = torch.empty((-(-m // rows), across), dtype=torch.float32, device=x.device)
    given = (x, out, *x.stride(), m, k, across, nan)
    block_amax_kernel[_grid(m, k, height, width)](*given, R=rows, C=cols, TM=height, TK=width)
    return out


def block_cast(
    x: Tensor, multiplier: Tensor, rows: int, cols: int, largest: float, dtype: torch.dtype, marks: bool = False
) -> Tensor:
    """(M, K) codes of x * multiplier, a grid of fp32; `dtype` is a torch float8 and `largest` its largest value.

    With `marks`, infinities become NaN.
    """
    m, k = x.shape
    out = torch.empty((m, k), dtype=dtype, device=x.device)
    given = (x, multiplier, out, *x.stride(), m, k, multiplier.shape[1], largest)
    cast_kernel[_grid(m, k, ROWS, COLS)](*given, **_extents(rows, cols), MARKS=marks, TM=ROWS, TK=COLS)
    return out


def block_values(codes: Tensor, factor: Tensor, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """(M, K) values of float8 codes times a grid of fp32 factors, in `dtype`."""
    m, k = codes.shape
    out = torch.empty((m, k), dtype=dtype, device=codes.device)
    given = (codes, factor, out, *codes.stride(), m, k, factor.shape[1])
    values_kernel[_grid(m, k, ROWS, COLS)](*given, **_extents(rows, cols), TM=ROWS, TK=COLS)
    return out


def fp32_scale(amax: Tensor, largest: float, overflow: float, epsilon: float, to_power: bool) -> tuple[Tensor, Tensor]:
    """The twin of `duotone.formats.stages.fp32_scale`; amax contiguous."""
    scale, stored, count = torch.empty_like(amax), torch.empty_like(amax), amax.numel()
    given = (amax, scale, stored, count, largest, overflow, epsilon)
    codec = (POWER if to_power else FP32).value + HIDES.value
    fp32_scale_kernel[(triton.cdiv(count, 1024),)](*given, CODEC=codec, T=1024)
    return scale, stored


def exponent_scale(amax: Tensor, reciprocal: float) -> tuple[Tensor, Tensor]:
    """The twin of `duotone.formats.stages.exponent_scale`; amax contiguous."""
    code, multiplier, count = torch.empty_like(amax, dtype=torch.uint8), torch.empty_like(amax), amax.numel()
    exponent_scale_kernel[(triton.cdiv(count, 1024),)](amax, code, multiplier, count, reciprocal, T=1024)
    return code, multiplier


def contiguous_rows(codes: Tensor) -> Tensor:
    """A copy of uint8 (M, K), such as a transposed one, whose rows are contiguous."""
    m, k = codes.shape
    out = torch.empty((m, k), dtype=torch.uint8, device=codes.device)
    rows_kernel[_grid(m, k, 64, 64)](codes, out, *codes.stride(), m, k, TM=64, TK=64)
    return out


def _extents(rows: int, cols: int) -> dict[str, Any]:
    """A block's extents as constants; an index divided by WHOLE is 0."""
    return {"R": rows or WHOLE, "C": cols or WHOLE, "WIDE_R": rows == 0, "WIDE_C": cols == 0}


def _grid(m: int, k: int, height: int, width: int) -> tuple[int, int]:
    return triton.cdiv(m, height), triton.cdiv(k, width)
