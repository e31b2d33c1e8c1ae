"""Decoding NVFP4: packed codes times E4M3 scales, which is exact in bf16, or times the global amax too."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from duotone.allocate import is_aligned
from duotone.kernels.decode import DTYPES
from duotone.kernels.e2m1 import bf16_pair
from duotone.kernels.launch import Launch, kernel

ONE, LINES = tl.constexpr(1), tl.constexpr(2)
"""Global amaxes: one, one per row, or (0) none."""

WORDS = 32
"""Words of eight codes that a program has in a row. A thread has one word at a time, and stores 16 bytes for it."""
PARTS = 8
"""Words of a thread, in rows below each other."""
WARPS = 4


@triton.jit
def _codes(codes, i, at, BYTES, exists, WHOLE: tl.constexpr):
    """Words `at` of rows i, of BYTES bytes each; what lies behind the end of a row is 0."""
    if WHOLE:
        word = tl.load(codes.to(tl.pointer_type(tl.uint32)) + (i * (BYTES // 4) + at), mask=exists, other=0)
    else:
        start, byte = codes + (i * BYTES + 4 * at), 4 * at
        word = tl.load(start, mask=exists, other=0).to(tl.uint32)
        for j in tl.static_range(1, 4):
            more = tl.load(start + j, mask=exists & (byte + j < BYTES), other=0)
            word |= more.to(tl.uint32) << (8 * j)
    return word


@triton.jit
def _value(word, factor, AT: tl.constexpr):
    """Element AT of each word times `factor`. Exponent and mantissa, put in place, are 2^-126 of the value."""
    up = word << (28 - 4 * AT)
    magnitude = (up >> 6) & 0x01C00000
    return ((up & 0x80000000) | magnitude).to(tl.float32, bitcast=True) * 8.507059173023462e37 * factor


@triton.jit
def _factor(scale, g, constant, FULL: tl.constexpr):
    factor = scale.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return (factor * g) * constant if FULL else factor


@triton.jit
def _keep(out, word, factor, i, first, BYTES, exists, DTYPE: tl.constexpr, R: tl.constexpr, T: tl.constexpr):
    """Store the values of words (T, R), the first of a row being number `first`, at rows i behind `out`."""
    v0, v1, v2, v3 = _value(word, factor, 0), _value(word, factor, 1), _value(word, factor, 2), _value(word, factor, 3)
    v4, v5, v6, v7 = _value(word, factor, 4), _value(word, factor, 5), _value(word, factor, 6), _value(word, factor, 7)
    if DTYPE == tl.bfloat16:  # a pair of values lies where a byte of codes does
        low, high = tl.join(bf16_pair(v0, v1), bf16_pair(v4, v5)), tl.join(bf16_pair(v2, v3), bf16_pair(v6, v7))
        at = 4 * first + tl.arange(0, 4 * T)[None, :]
        pairs = tl.reshape(tl.permute(tl.join(low, high), [1, 0, 2, 3]), [R, 4 * T])
        tl.store(out.to(tl.pointer_type(tl.int32)) + (i * BYTES + at), pairs, mask=exists & (at < BYTES))
    else:
        even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
        result = tl.join(even, tl.join(tl.join(v1, v5), tl.join(v3, v7)))
        at = 8 * first + tl.arange(0, 8 * T)[None, :]
        result = tl.reshape(tl.permute(result, [1, 0, 2, 3, 4]), [R, 8 * T]).to(DTYPE)
        tl.store(out + (i * 2 * BYTES + at), result, mask=exists & (at < 2 * BYTES))


@kernel
def nvfp4_decode_kernel(
    codes, scales, amax, out, M, BYTES, DOWN, ACROSS, constant,
    DTYPE: tl.constexpr, AMAX: tl.constexpr, WHOLE: tl.constexpr,
    R: tl.constexpr, T: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """value(code) * scale, or fl(value(code) * fl(fl(scale * amax) * constant)), of rows of BYTES bytes."""
    across = tl.cdiv(BYTES, 4 * T)
    pm, pk = tl.program_id(0) // across, tl.program_id(0) % across
    row, i = (pm * PARTS * R).to(tl.int64), tl.arange(0, R)
    # Words are the first axis: Triton takes that for the fastest one where loads do not tell, such as those of scales.
    at = pk * T + tl.arange(0, T)[:, None]
    words, factors = (), ()
    for j in tl.static_range(PARTS):
        m, start = pm * PARTS * R + j * R + i[None, :], row + j * R
        exists = (m < M) & (4 * at < BYTES)
        words += (_codes(codes + start * BYTES, i[None, :], at, BYTES, exists, WHOLE),)
        scale = tl.load(scales + start * DOWN + (i[None, :] * DOWN + (at // 2) * ACROSS), mask=exists, other=0)
        g = 1.0
        if AMAX == ONE:
            g = tl.load(amax)
        elif AMAX == LINES:
            g = tl.load(amax + m, mask=m < M, other=0.0)
        factors += (_factor(scale, g, constant, AMAX != 0),)
    for j in tl.static_range(PARTS):
        m, start = (pm * PARTS * R + j * R + i)[:, None], (row + j * R) * (2 * BYTES)
        _keep(out + start, words[j], factors[j], i[:, None], pk * T, BYTES, m < M, DTYPE, R, T)


def decode(codes: Tensor, scales: Tensor, amax: Tensor | None, top: float, dtype: torch.dtype) -> Tensor:
    """(M, 2 * bytes of a row) values of contiguous codes, in `dtype`. Without `amax`, under the block scales alone.

    `top` is the largest element times the largest block scale.
    """
    m, width = codes.shape
    out = torch.empty((m, 2 * width), dtype=dtype, device=codes.device)
    amaxes = 0 if amax is None else LINES.value if m > 1 and amax.numel() > 1 else ONE.value
    launch = _launch(dtype, amaxes, width % 4 == 0 and is_aligned(codes, 4))
    programs = -(-m // (PARTS * WARPS)) * -(-width // (4 * WORDS))
    launch(programs, (codes, scales, amax, out), (m, width, *scales.stride()), (1.0 / top,))
    return out


@functools.cache
def _launch(dtype: torch.dtype, amaxes: int, whole: bool) -> Launch:
    constants = {"DTYPE": DTYPES[dtype], "AMAX": amaxes, "WHOLE": whole, "R": WARPS, "T": WORDS, "PARTS": PARTS}
    return nvfp4_decode_kernel.bind(constants, WARPS, options={"enable_fp_fusion": False})
