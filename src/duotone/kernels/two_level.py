"""NVFP4's scales inside of kernels: E4M3 numbers of blocks under one fp32 number, as `duotone.formats.scales` says.

Blocks are groups of 16 elements (see `e2m1`), or squares. SQUARE is 1 if the groups of a square lie below each other in
a tile of (A, B) groups, and 2 if they lie beside each other.
"""

import torch
import triton
import triton.language as tl

from duotone.formats import ErrorNorm
from duotone.kernels.e2m1 import largest, quantized

MAE, MSE = tl.constexpr(1), tl.constexpr(2)
"""Errors that decide whether a block's amax becomes 6 or 4."""

SEARCHES = {None: 0, ErrorNorm.MAE: MAE.value, ErrorNorm.MSE: MSE.value}
FLT_MAX = tl.constexpr(torch.finfo(torch.float32).max)
SIXTH = tl.constexpr(torch.tensor(1.0 / 6.0).item())
"""1/6 in fp32."""


@triton.jit
def _outer(g, top):
    """S = top / g; 1 if g is 0 or the quotient is 0."""
    result = tl.minimum(tl.div_rn(top, g), FLT_MAX)
    return tl.where((g == 0.0) | (result == 0.0), 1.0, result)


@triton.jit
def _stored(scale):
    return tl.minimum(scale, FLT_MAX).to(tl.float8e4nv)


@triton.jit
def _multiplier(code, inverse):
    """The multiplier of elements under a stored scale. For a scale of 0 it is FLT_MAX."""
    divisor = code.to(tl.float32) * inverse
    return tl.minimum(tl.div_rn(1.0, divisor), FLT_MAX)


@triton.jit
def _by_block(t, A: tl.constexpr, B: tl.constexpr, SQUARE: tl.constexpr):
    """amaxes of groups (A, B) -> those of blocks: groups, or 16 groups below (1) or beside (2) each other."""
    if SQUARE == 1:
        result = tl.max(tl.reshape(t, [A // 16, 16, B]), axis=1)
    elif SQUARE == 2:
        result = tl.max(tl.reshape(t, [A, B // 16, 16]), axis=2)
    else:
        result = t
    return result


@triton.jit
def spread(t, A: tl.constexpr, B: tl.constexpr, SQUARE: tl.constexpr):
    """A number per block -> one per group."""
    if SQUARE == 1:
        result = tl.reshape(tl.broadcast_to(t[:, None, :], [A // 16, 16, B]), [A, B])
    elif SQUARE == 2:
        result = tl.reshape(tl.broadcast_to(t[:, :, None], [A, B // 16, 16]), [A, B])
    else:
        result = t
    return result


@triton.jit
def _error(v, code, q, g, top, SEARCH: tl.constexpr, A: tl.constexpr, B: tl.constexpr, SQUARE: tl.constexpr):
    """The error of a candidate in each block: summed along groups in order, then over groups of a square by halves."""
    scale, q = spread(code.to(tl.float32), A, B, SQUARE), spread(q, A, B, SQUARE)
    for j in tl.static_range(16):
        value = quantized(v[j], q) * scale * g
        lost = tl.div_rn(value, top) - v[j]
        term = lost * lost if SEARCH == MSE else tl.abs(lost)
        total = term if j == 0 else total + term  # noqa: F821
    if SQUARE == 1:
        total = tl.sum(tl.reshape(total, [A // 16, 2, 8, B]), axis=1)
        total = tl.sum(tl.reshape(total, [A // 16, 2, 4, B]), axis=1)
        total = tl.sum(tl.reshape(total, [A // 16, 2, 2, B]), axis=1)
        total = tl.sum(total, axis=1)
    return total


@triton.jit
def scales(v, g, top, SEARCH: tl.constexpr, A: tl.constexpr, B: tl.constexpr, SQUARE: tl.constexpr):
    """E4M3 scales of blocks as bytes, and the multipliers of their elements."""
    amax = _by_block(largest(v, False), A, B, SQUARE)
    outer = _outer(g, top)
    inverse = tl.div_rn(1.0, outer)
    if SEARCH == 0:
        code = _stored(amax * (outer * SIXTH))
        q = _multiplier(code, inverse)
        byte = code.to(tl.uint8, bitcast=True)
    else:
        to_six = tl.div_rn(amax, 6.0) * outer
        four, six = _stored(to_six * 1.5), _stored(to_six)
        q_four, q_six = _multiplier(four, inverse), _multiplier(six, inverse)
        lost = _error(v, four, q_four, g, top, SEARCH, A, B, SQUARE)
        pick_four = lost < _error(v, six, q_six, g, top, SEARCH, A, B, SQUARE)
        byte = tl.where(pick_four, four.to(tl.uint8, bitcast=True), six.to(tl.uint8, bitcast=True))
        q = tl.where(pick_four, q_four, q_six)
    return byte, q
