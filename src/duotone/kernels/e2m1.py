"""Groups of 16 elements inside of kernels. Each of 16 tensors holds one element of all groups, so a thread holds whole
groups. Their transform, amax, rounding and packing need no other thread.

Codes are computed in floating point. The E2M1 code of a magnitude a is the least of three lines: 2a, a + 2, a / 2 + 4.
Rounding the code to nearest, ties to even, rounds the E2M1 value in the same way. Each line is one fma onto 2^23, where
the spacing of fp32 is 1.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from duotone.formats.hadamard import SIGN_MASK
from duotone.kernels.amax import larger

BASE = tl.constexpr(8388608.0 + 8.0)
"""The code of a magnitude is added to this. Its sign then moves the sum by 4, down or up."""
LARGEST_CODE = tl.constexpr(8388608.0 + 15.0)
BIAS = tl.constexpr(sum((0x4B000004 << 4 * i) for i in range(8)) % 2**32)
"""Eight such sums, shifted to their nibbles, hold this besides the codes, modulo 2^32."""


@triton.jit
def _eight(t, A: tl.constexpr, B: tl.constexpr):
    """(A, B, 8) -> its 8 slices (A, B), as fp32."""
    even, odd = tl.split(tl.reshape(t, [A, B, 2, 2, 2]))
    e0, e2 = tl.split(even)
    o1, o3 = tl.split(odd)
    v0, v4 = tl.split(e0)
    v2, v6 = tl.split(e2)
    v1, v5 = tl.split(o1)
    v3, v7 = tl.split(o3)
    return _wide(v0), _wide(v1), _wide(v2), _wide(v3), _wide(v4), _wide(v5), _wide(v6), _wide(v7)


@triton.jit
def _wide(value):
    """To fp32. The upper one of two bf16 in a register takes one integer instruction; its conversion takes two."""
    if value.dtype == tl.bfloat16:
        result = (value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        result = value.to(tl.float32)
    return result


@triton.jit
def along(x, start, M, K, pm, pk, TM: tl.constexpr, TK: tl.constexpr, EVEN: tl.constexpr):
    """The groups of a tile that lie within rows: 16 x fp32 (TM, TK / 16)."""
    G: tl.constexpr = TK // 16
    m, k = tl.arange(0, TM)[:, None, None], 16 * tl.arange(0, G)[None, :, None] + tl.arange(0, 8)[None, None, :]
    at = x + start + (m * K + k)
    if EVEN:
        first, second = tl.load(at), tl.load(at + 8)
    else:
        m, k = pm * TM + m, pk * TK + k
        first = tl.load(at, mask=(m < M) & (k < K), other=0.0)
        second = tl.load(at + 8, mask=(m < M) & (k + 8 < K), other=0.0)
    return _eight(first, TM, G) + _eight(second, TM, G)


@triton.jit
def down(x, start, M, K, pm, pk, TM: tl.constexpr, TK: tl.constexpr, EVEN: tl.constexpr):
    """The groups of a tile that lie within columns: 16 x fp32 (TM / 16, TK)."""
    h, k = 16 * tl.arange(0, TM // 16)[:, None], tl.arange(0, TK)[None, :]
    at = x + start + (h * K + k)
    result = (_load(at, pm * TM + h, M, pk * TK + k, K, EVEN),)
    for j in tl.static_range(1, 16):
        result += (_load(at + j * K, pm * TM + h + j, M, pk * TK + k, K, EVEN),)
    return result


@triton.jit
def _load(at, m, M, k, K, EVEN: tl.constexpr):
    if EVEN:
        value = tl.load(at)
    else:
        value = tl.load(at, mask=(m < M) & (k < K), other=0.0)
    return _wide(value)


@triton.jit
def rotated(v):
    """The Hadamard transform of groups of bf16 values, in fp32: sums of 16 products one after the other.

    After i products, outputs share a sum if their numbers agree in as many low bits as i has.
    """
    result = (v[0] * _quarter(0, 0),)
    for i in tl.static_range(1, 16):
        sums = ()
        for j in tl.static_range(_distinct(i)):
            sums += (tl.fma(v[i], _quarter(i, j), result[j % _distinct(i - 1)]),)  # the product is exact
        result = sums
    return result


@triton.constexpr_function
def _distinct(i):
    """How many outputs differ after the products of inputs 0 to i."""
    return 1 << i.bit_length()


@triton.constexpr_function
def _quarter(i, j):
    """Element (i, j) of the transform."""
    return -0.25 if (SIGN_MASK >> i ^ (i & j).bit_count()) & 1 else 0.25


@triton.jit
def transformed(x, v):
    """The Hadamard transform, in fp32, of groups that were loaded from x."""
    if x.dtype.element_ty != tl.bfloat16:
        v = rounded(v)
    return rotated(v)


@triton.jit
def rounded(v):
    """To bf16 and back."""
    result = _rounded_pair(v[0], v[1])
    for j in tl.static_range(2, 16, 2):
        result += _rounded_pair(v[j], v[j + 1])
    return result


@triton.jit
def _rounded_pair(a, b):
    pair = bf16_pair(a, b)
    return (pair << 16).to(tl.float32, bitcast=True), (pair & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def bf16_pair(low, high):
    """Two bf16 in an int32: one conversion, many times as fast as two."""
    return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], tl.int32, True, 1)


@triton.jit
def largest(v, NAN: tl.constexpr):
    """The amax of each group. NaN counts as 0; with NAN it stays."""
    result = larger(tl.abs(v[0]), 0.0, NAN)
    for j in tl.static_range(1, 16):
        result = larger(result, tl.abs(v[j]), NAN)
    return result


@triton.jit
def product(value, q):
    """fl(value * q). On NVIDIA GPUs a NaN from arithmetic has no sign, so its code has none either."""
    return value * q


@triton.jit
def nearest(a):
    """BASE + code of magnitudes, NaN like infinity."""
    lower = tl.minimum(tl.fma(a, 2.0, BASE), a + (BASE + 2.0))
    return tl.minimum(lower, tl.minimum(tl.fma(a, 0.5, BASE + 4.0), LARGEST_CODE))


@triton.jit
def stochastic(a, dither):
    """BASE + code of a + 2 step dither, rounded down; `dither` is in [0, 0.5).

    There is one sum for the step of each of the three lines. The step at `a` has the least code.
    """
    first = libdevice.fma_rz(a + dither, 2.0, BASE)
    second = libdevice.fma_rz(tl.fma(dither, 2.0, a), 1.0, BASE + 2.0)
    third = libdevice.fma_rz(tl.fma(dither, 4.0, a), 0.5, BASE + 4.0)
    return tl.minimum(tl.minimum(first, second), tl.minimum(third, LARGEST_CODE))


@triton.jit
def _nibble(value, q, dither, RANDOM: tl.constexpr):
    """int32 that holds a code above its share of BIAS."""
    scaled = product(value, q)
    if RANDOM:
        code = stochastic(tl.abs(scaled), dither)
    else:
        code = nearest(tl.abs(scaled))
    four = ((scaled.to(tl.int32, bitcast=True) & -0x80000000) | 0x40800000).to(tl.float32, bitcast=True)
    return (code - four).to(tl.int32, bitcast=True)


@triton.jit
def _word(v, q, dither, AT: tl.constexpr, RANDOM: tl.constexpr):
    """The codes of elements AT to AT + 7 in int32, the first lowest."""
    word = _nibble(v[AT], q, dither[AT], RANDOM)
    for j in tl.static_range(1, 8):
        word += _nibble(v[AT + j], q, dither[AT + j], RANDOM) << (4 * j)
    return word.to(tl.uint32, bitcast=True) - BIAS


@triton.jit
def packed(v, q, dither, RANDOM: tl.constexpr):
    """The codes of fl(v * q) in two uint32 words; `dither` is read where RANDOM."""
    return _word(v, q, dither, 0, RANDOM), _word(v, q, dither, 8, RANDOM)


@triton.jit
def quantized(value, q):
    """fl(value * q) to nearest E2M1 values."""
    scaled = product(value, q)
    code = nearest(tl.abs(scaled)) - BASE
    magnitude = tl.maximum(tl.maximum(code * 0.5, code - 2.0), code * 2.0 - 8.0)
    return tl.where(scaled < 0.0, -magnitude, magnitude)


@triton.jit
def _words(seed, group, PLANE: tl.constexpr):
    """One block of the stream for each number."""
    low, high = group.to(tl.int32), (group >> 32).to(tl.int32)
    return tl.philox(seed, low, high, PLANE, 0)


@triton.jit
def dithers(seed, group, PLANE: tl.constexpr):
    """The random bytes over 512 of the elements of groups, numbered in a plane's row-major order by int64."""
    words = _words(seed, group, PLANE)
    result = (_dither(words[0], 0),)
    for j in tl.static_range(1, 16):
        result += (_dither(words[j // 4], j % 4),)
    return result


@triton.jit
def _dither(word, BYTE: tl.constexpr):
    """A byte becomes the low bits of a float: of 2^14 or, if it lies 8 bits higher, of 2^6."""
    half = word >> 16 if BYTE >= 2 else word
    if BYTE % 2 == 0:
        result = ((half & 0xFF) | 0x46800000).to(tl.float32, bitcast=True) - 16384.0
    else:
        result = ((half & 0xFF00) | 0x42800000).to(tl.float32, bitcast=True) - 64.0
    return result


@triton.jit
def dither_of(seed, element, PLANE: tl.constexpr):
    """The random byte over 512 of each element, numbered by int64. Each element takes a block of the stream."""
    words = _words(seed, element >> 4, PLANE)
    i = (element & 15).to(tl.int32)
    word = tl.where(i < 8, tl.where(i < 4, words[0], words[1]), tl.where(i < 12, words[2], words[3]))
    return ((word >> (8 * (i & 3)).to(tl.uint32)) & 0xFF).to(tl.float32) * (1.0 / 512.0)
