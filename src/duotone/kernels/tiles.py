"""The kernel of a cast: tiles of a matrix (M, K), their codes and scales for one plane or for both.

The columnwise plane is written transposed, (K, M), so that its contraction lies next to each other.
"""

import functools

import triton
import triton.language as tl

from duotone.kernels.activations import GATED_SLOPE, gated_slopes, produced
from duotone.kernels.amax import record
from duotone.kernels.elements import codes_of, is_packed, is_small
from duotone.kernels.launch import kernel
from duotone.kernels.scaling import hides, marked_four
from duotone.kernels.tile_scales import (
    ABSENT,
    BLOCK,
    LINE,
    OUTSIDE,
    SHARED,
    TENSOR,
    column_scales,
    one_scale,
    row_lines,
    scale_of_rows,
    square_scales,
)


@triton.jit
def existing(i, rows, j, cols, EVEN: tl.constexpr):
    """Which elements exist. None if all exist."""
    if EVEN:
        result = None
    else:
        result = (i < rows) & (j < cols)
    return result


@triton.jit
def magnitude(value, ELEMENT: tl.constexpr, CODEC: tl.constexpr):
    """|value|. If the element has no NaN, NaN is infinite, so that its block has a scale of NaN, unless that HIDES."""
    result = tl.abs(value)
    if is_small(ELEMENT) and not hides(CODEC):
        result = tl.where(result == result, result, float("inf"))
    return result


@triton.jit
def store_turned(
    values, scale, codes, stride, pm, pk, M, K,
    ELEMENT: tl.constexpr, EVEN: tl.constexpr, H: tl.constexpr, TK: tl.constexpr,
):  # fmt: skip
    """The codes of a tile, transposed, into (K, M): four rows of a thread become one word of a row of the transpose."""
    v0, v1, v2, v3 = values
    fours = tl.join(tl.join(v0 * scale, v2 * scale), tl.join(v1 * scale, v3 * scale))
    result = codes_of(tl.reshape(fours, [H, TK, 4]), ELEMENT)
    result = tl.reshape(tl.permute(result, [1, 0, 2]), [TK, 4 * H])
    im, ik = tl.arange(0, 4 * H)[None, :], tl.arange(0, TK)[:, None]
    out = codes + (pk * TK).to(tl.int64) * stride + pm * 4 * H + (ik * stride + im)
    tl.store(out, result, mask=existing(pk * TK + ik, K, pm * 4 * H + im, M, EVEN))


@triton.jit
def _store_turned_pairs(
    values, scale, codes, pm, pk, M, K, ELEMENT: tl.constexpr, EVEN: tl.constexpr, H: tl.constexpr, TK: tl.constexpr
):
    """As `store_turned`, codes of 4 bits into bytes (K, ceil(M / 2))."""
    v0, v1, v2, v3 = values
    low, high = tl.join(v0 * scale, v2 * scale), tl.join(v1 * scale, v3 * scale)
    high = codes_of(high, ELEMENT)
    if not EVEN:  # behind the last row codes are 0, even if the scale is NaN
        m = pm * 4 * H + 4 * tl.arange(0, H)[:, None, None] + 2 * tl.arange(0, 2)[None, None, :] + 1
        high = tl.where(m < M, high, 0)
    pairs = codes_of(low, ELEMENT) | (high << 4)
    pairs = tl.reshape(tl.permute(pairs, [1, 0, 2]), [TK, 2 * H])
    im, ik, width = tl.arange(0, 2 * H)[None, :], tl.arange(0, TK)[:, None], tl.cdiv(M, 2)
    out = codes + (pk * TK).to(tl.int64) * width + pm * 2 * H + (ik * width + im)
    tl.store(out, pairs, mask=existing(pk * TK + ik, K, pm * 2 * H + im, width, EVEN))


@triton.jit
def _store_pairs(codes, out, row, i, m, pk, M, K, EVEN: tl.constexpr, H: tl.constexpr, TK: tl.constexpr):
    """The codes of rows `row` + i, of 4 bits, into bytes (M, ceil(K / 2))."""
    k, width = (pk * (TK // 2) + tl.arange(0, TK // 2))[None, :], tl.cdiv(K, 2)
    low, high = tl.split(tl.reshape(codes, [H, TK // 2, 2]))
    if not EVEN:  # behind the last column codes are 0, even if the scale is NaN
        high = tl.where(2 * k + 1 < K, high, 0)
    tl.store(out + row * width + (i * width + k), low | (high << 4), mask=existing(m, M, k, width, EVEN))


@triton.jit
def _highest(values, below, ELEMENT: tl.constexpr, CODEC: tl.constexpr):
    """The largest of the four `magnitude`s; if NaN does not count, `below`, which has none."""
    if is_small(ELEMENT) and not hides(CODEC):
        v0, v1, v2, v3 = values
        upper = tl.maximum(magnitude(v0, ELEMENT, CODEC), magnitude(v1, ELEMENT, CODEC))
        below = tl.maximum(upper, tl.maximum(magnitude(v2, ELEMENT, CODEC), magnitude(v3, ELEMENT, CODEC)))
    return below


@triton.jit
def _next_tile(across, BACKWARDS: tl.constexpr):
    """The tile of a program. After amaxes it is from the end, which they read last, so that L2 still holds it."""
    tile = tl.program_id(0)
    if BACKWARDS:
        tile = tl.num_programs(0) - 1 - tile
    return tile // across, tile % across


@triton.jit
def cast_tile(
    values, row_plane, col_plane, live, pm, pk, M, K, P, LENGTH, STRIDE,
    ROW: tl.constexpr, ROW_ELEMENT: tl.constexpr, ROW_R: tl.constexpr, ROW_C: tl.constexpr, ROW_CODEC: tl.constexpr,
    COL: tl.constexpr, COL_ELEMENT: tl.constexpr, COL_R: tl.constexpr, COL_C: tl.constexpr, COL_CODEC: tl.constexpr,
    MARKS: tl.constexpr, RECORD: tl.constexpr, TM: tl.constexpr, TK: tl.constexpr, EVEN: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Amax, codes and scales of a tile. A plane is its codes, its scales, the source of these and three limits.

    Rows of columnwise codes have LENGTH elements, with zeros behind the M-th, and lie STRIDE apart.
    """
    H: tl.constexpr = TM // 4
    SQUARE: tl.constexpr = ROW == BLOCK and ROW_R > 1
    row_codes, row_scales, row_from, row_limits = row_plane
    col_codes, col_scales, col_from, col_limits = col_plane
    i, k = 4 * tl.arange(0, H)[:, None], (pk * TK + tl.arange(0, TK))[None, :]
    m, row = pm * TM + i, (pm * TM).to(tl.int64)
    v0, v1, v2, v3 = values
    below = tl.maximum(tl.maximum(tl.abs(v0), tl.abs(v1)), tl.maximum(tl.abs(v2), tl.abs(v3)))

    if RECORD:
        record(live, below)
    row_scale = 1.0
    if ROW == OUTSIDE or ROW == TENSOR:
        row_scale = one_scale(row_from, row_scales, P, pm, pk, row_limits, ROW, ROW_CODEC, N)
    elif SQUARE:
        row_scale = square_scales(
            _highest(values, below, ROW_ELEMENT, ROW_CODEC), row_scales, col_scales, pm, pk, M, K, row_limits,
            COL == SHARED, ROW_R, ROW_C, ROW_CODEC, False, H, TK,
        )  # fmt: skip
    if ROW != ABSENT:
        lines = row_lines(row_from, row_scales, pm * TM, M, pk == 0, row_limits, ROW, ROW_CODEC, H)
        row_values = marked_four(values, MARKS and ROW == OUTSIDE)
        for j in tl.static_range(4):
            highest = magnitude(values[j], ROW_ELEMENT, ROW_CODEC)
            row_scale = scale_of_rows(
                row_scale, lines[j], highest, row_scales, m + j, M, K, pk, row_limits,
                ROW, ROW_R, ROW_C, ROW_CODEC, H, TK,
            )  # fmt: skip
            codes = codes_of(row_values[j] * row_scale, ROW_ELEMENT)
            if is_packed(ROW_ELEMENT):
                _store_pairs(codes, row_codes, row + j, i, m + j, pk, M, K, EVEN, H, TK)
            else:
                tl.store(row_codes + (row + j) * K + (i * K + k), codes, mask=existing(m + j, M, k, K, EVEN))

    if COL != ABSENT:
        scale = row_scale
        if COL != SHARED:
            scale = column_scales(
                _highest(values, below, COL_ELEMENT, COL_CODEC), col_from, col_scales, P, pm, pk, M, K, col_limits,
                COL, COL_R, COL_C, COL_CODEC, H, TK, N,
            )  # fmt: skip
        values = marked_four(values, MARKS and (COL == OUTSIDE or (COL == SHARED and ROW == OUTSIDE)))
        if is_packed(COL_ELEMENT):
            _store_turned_pairs(values, scale, col_codes, pm, pk, M, K, COL_ELEMENT, EVEN, H, TK)
        else:
            store_turned(values, scale, col_codes, STRIDE, pm, pk, LENGTH, K, COL_ELEMENT, EVEN, H, TK)


@functools.partial(kernel, unspecialized=("P",), any_alignment=("row_from", "col_from", "live"))
def cast_kernel(
    x, z, mean, rstd, gamma, beta, row_codes, row_scales, col_codes, col_scales, row_from, col_from, live, noop,
    M, K, P, row_largest, row_overflow, row_epsilon, col_largest, col_overflow, col_epsilon,
    ROW: tl.constexpr, ROW_ELEMENT: tl.constexpr, ROW_R: tl.constexpr, ROW_C: tl.constexpr, ROW_CODEC: tl.constexpr,
    COL: tl.constexpr, COL_ELEMENT: tl.constexpr, COL_R: tl.constexpr, COL_C: tl.constexpr, COL_CODEC: tl.constexpr,
    WHAT: tl.constexpr, ACT: tl.constexpr, MARKS: tl.constexpr, RECORD: tl.constexpr,
    TM: tl.constexpr, TK: tl.constexpr, EVEN: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One tile of the matrix that follows from x and z, or of the norm: its amax if needed, codes and scales of planes.
    Gated gradients have two tiles, one in each half.

    `row_from` and `col_from` hold an encode scale or amaxes. With RECORD the amax of the matrix goes into `live`. With
    MARKS infinities are NaN. Blocks are ROW_R x ROW_C and COL_R x COL_C as they lie in x. A thread holds four rows
    below each other, so that the transposed codes move through shared memory as words. If `noop` is not 0, nothing is
    read or written.
    """
    if noop is not None:
        if tl.load(noop) != 0:
            return
    H: tl.constexpr = TM // 4
    TILES: tl.constexpr = 2 if WHAT == GATED_SLOPE else 1
    W = K // TILES
    pm, pk = _next_tile(tl.cdiv(W, TK), ROW == TENSOR or ROW == LINE or COL == TENSOR or COL == LINE)
    i, k = 4 * tl.arange(0, H)[:, None], (pk * TK + tl.arange(0, TK))[None, :]
    m, row, norm = pm * TM + i, (pm * TM).to(tl.int64), (mean, rstd, gamma, beta)
    if TILES == 2:
        a0, b0 = gated_slopes(x, z, row, i, k, W, existing(m, M, k, W, EVEN), ACT)
        a1, b1 = gated_slopes(x, z, row + 1, i, k, W, existing(m + 1, M, k, W, EVEN), ACT)
        a2, b2 = gated_slopes(x, z, row + 2, i, k, W, existing(m + 2, M, k, W, EVEN), ACT)
        a3, b3 = gated_slopes(x, z, row + 3, i, k, W, existing(m + 3, M, k, W, EVEN), ACT)
        result = (a0, a1, a2, a3), (b0, b1, b2, b3)
    else:
        v0 = produced(x, z, norm, row, i, k, M, K, existing(m, M, k, K, EVEN), WHAT, ACT)
        v1 = produced(x, z, norm, row + 1, i, k, M, K, existing(m + 1, M, k, K, EVEN), WHAT, ACT)
        v2 = produced(x, z, norm, row + 2, i, k, M, K, existing(m + 2, M, k, K, EVEN), WHAT, ACT)
        v3 = produced(x, z, norm, row + 3, i, k, M, K, existing(m + 3, M, k, K, EVEN), WHAT, ACT)
        result = ((v0, v1, v2, v3),)
    row_plane = row_codes, row_scales, row_from, (row_largest, row_overflow, row_epsilon)
    col_plane = col_codes, col_scales, col_from, (col_largest, col_overflow, col_epsilon)
    for t in tl.static_range(TILES):
        cast_tile(
            result[t], row_plane, col_plane, live, pm, pk + t * (W // TK), M, K, P, M, M,
            ROW, ROW_ELEMENT, ROW_R, ROW_C, ROW_CODEC, COL, COL_ELEMENT, COL_R, COL_C, COL_CODEC,
            MARKS, RECORD, TM, TK, EVEN, N,
        )  # fmt: skip
