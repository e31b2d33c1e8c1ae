"""The scales of a tile of a cast: from outside, from amaxes of an earlier kernel, or from the tile itself."""

import triton
import triton.language as tl

from duotone.kernels.amax import nan_to_zero
from duotone.kernels.scaling import encode_scale, given_scale, stored_scale

ABSENT, OUTSIDE, TENSOR, LINE, BLOCK = (tl.constexpr(i) for i in range(5))
"""Where a plane's scale comes from."""

SHARED = tl.constexpr(5)
"""The columnwise plane has the codes and scales of the rowwise one, transposed."""


@triton.jit
def _largest(magnitude, R: tl.constexpr, C: tl.constexpr, H: tl.constexpr, TK: tl.constexpr):
    """max of every R x C block of (H, TK) magnitudes: (H / R, TK / C), NaN counting as 0."""
    if R == 1 and C == TK:
        result = tl.max(magnitude, axis=1)[:, None]
    elif R == H and C == 1:
        result = tl.max(magnitude, axis=0)[None, :]
    else:
        result = tl.max(tl.max(tl.reshape(magnitude, [H // R, R, TK // C, C]), axis=3), axis=1)
    return nan_to_zero(result)


@triton.jit
def _spread(scale, R: tl.constexpr, C: tl.constexpr, H: tl.constexpr, TK: tl.constexpr):
    """A scale per block -> scales that broadcast to (H, TK)."""
    if (R == 1 and C == TK) or (R == H and C == 1):
        result = scale
    else:
        result = tl.reshape(tl.broadcast_to(scale[:, None, :, None], [H // R, R, TK // C, C]), [H, TK])
    return result


@triton.jit
def _keep(out, stored, bm, bk, gm, gk, DOWN: tl.constexpr):
    """Store the scales of blocks bm, bk of a gm x gk grid. With DOWN the grid is stored by columns."""
    at = bk * gm + bm if DOWN else bm * gk + bk
    tl.store(out + at, stored, mask=(bm < gm) & (bk < gk))


@triton.jit
def one_scale(source, scales, P, pm, pk, limits, FROM: tl.constexpr, CODEC: tl.constexpr, N: tl.constexpr):
    """The one scale of a plane, from outside or from partial amaxes. The first tile stores it."""
    if FROM == OUTSIDE:
        amax = tl.load(source)
        scale = given_scale(amax, CODEC)
    else:
        i = tl.arange(0, N)
        amax = tl.max(tl.load(source + i, mask=i < P, other=0.0), axis=0)
        scale = encode_scale(amax, limits, CODEC)
    tl.store(scales, stored_scale(amax, scale, limits[0], CODEC), mask=(pm == 0) & (pk == 0))
    return scale


@triton.jit
def line_scales(source, scales, read, write, exists, stores, limits, CODEC: tl.constexpr):
    """The scales (T,) of whole lines, read at one place and stored at another. Each is computed once, by one thread."""
    amax = tl.load(source + read, mask=exists, other=1).to(tl.float32, bitcast=True)
    scale = encode_scale(amax, limits, CODEC)
    tl.store(scales + write, stored_scale(amax, scale, limits[0], CODEC), mask=exists & stores)
    return scale


@triton.jit
def fours(scale, H: tl.constexpr):
    """(4 H,) -> those of every fourth line from the first, the second, ..., each (H, 1)."""
    even, odd = tl.split(tl.reshape(scale, [H, 2, 2]))
    s0, s2 = tl.split(even)
    s1, s3 = tl.split(odd)
    return s0[:, None], s1[:, None], s2[:, None], s3[:, None]


@triton.jit
def row_lines(
    source, scales, start, M, stores, limits,
    FROM: tl.constexpr, CODEC: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """The scales of a tile's rows as `fours` gives them, ones if rows have no scales."""
    if FROM == LINE:
        m = start + tl.arange(0, 4 * H)
        result = fours(line_scales(source, scales, m, m, m < M, stores, limits, CODEC), H)
    else:
        result = (1.0, 1.0, 1.0, 1.0)
    return result


@triton.jit
def scale_of_rows(
    one, line, magnitude, scales, m, M, K, pk, limits,
    FROM: tl.constexpr, R: tl.constexpr, C: tl.constexpr, CODEC: tl.constexpr, H: tl.constexpr, TK: tl.constexpr,
):  # fmt: skip
    """The multipliers of rows m of the rowwise plane: the scales of lines, those of blocks, or the one scale."""
    if FROM == LINE:
        result = line
    elif FROM == BLOCK and R == 1:
        result = _line(magnitude, scales, m, M, K, pk, limits, C, CODEC, H, TK)
    else:
        result = one
    return result


@triton.jit
def _line(
    magnitude, scales, m, M, K, pk, limits,
    C: tl.constexpr, CODEC: tl.constexpr, H: tl.constexpr, TK: tl.constexpr,
):  # fmt: skip
    """Scales of the lines `m` of a tile, one per C columns, that broadcast to (H, TK)."""
    amax = _largest(magnitude, 1, C, H, TK)
    scale = encode_scale(amax, limits, CODEC)
    bk = (pk * (TK // C) + tl.arange(0, TK // C))[None, :]
    _keep(scales, stored_scale(amax, scale, limits[0], CODEC), m, bk, M, tl.cdiv(K, C), True)
    return _spread(scale, 1, C, H, TK)


@triton.jit
def square_scales(
    below, scales, turned, pm, pk, M, K, limits,
    SHARED: tl.constexpr, R: tl.constexpr, C: tl.constexpr, CODEC: tl.constexpr, DOWN: tl.constexpr,
    H: tl.constexpr, TK: tl.constexpr,
):  # fmt: skip
    """Scales of a tile's R x C blocks, R at least 4, that broadcast to (H, TK); stored transposed too where SHARED."""
    amax = _largest(below, R // 4, C, H, TK)
    scale = encode_scale(amax, limits, CODEC)
    stored = stored_scale(amax, scale, limits[0], CODEC)
    bm = (pm * (4 * H // R) + tl.arange(0, 4 * H // R))[:, None]
    bk = (pk * (TK // C) + tl.arange(0, TK // C))[None, :]
    _keep(scales, stored, bm, bk, tl.cdiv(M, R), tl.cdiv(K, C), DOWN)
    if SHARED:
        _keep(turned, stored, bm, bk, tl.cdiv(M, R), tl.cdiv(K, C), not DOWN)
    return _spread(scale, R // 4, C, H, TK)


@triton.jit
def column_scales(
    below, source, scales, P, pm, pk, M, K, limits,
    FROM: tl.constexpr, R: tl.constexpr, C: tl.constexpr, CODEC: tl.constexpr,
    H: tl.constexpr, TK: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Scales of the columnwise plane of a tile, that broadcast to (H, TK)."""
    if FROM == OUTSIDE or FROM == TENSOR:
        result = one_scale(source, scales, P, pm, pk, limits, FROM, CODEC, N)
    elif FROM == LINE:
        k = pk * TK + tl.arange(0, TK)
        result = line_scales(source, scales, k, k, k < K, pm == 0, limits, CODEC)[None, :]
    else:
        result = square_scales(
            below, scales, scales, pm, pk, M, K, limits, False, R, C, CODEC, C > 1, H, TK
        )  # fmt: skip
    return result
