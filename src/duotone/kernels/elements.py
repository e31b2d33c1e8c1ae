"""Codes of elements inside of kernels: the hardware converts to FP8, and other codes are computed in integers."""

import torch
import triton
import triton.language as tl

E2M1, E2M3, E3M2 = (tl.constexpr(i) for i in range(3))
"""Elements of 4 and 6 bits. Two codes of 4 bits share a byte, the first in the low nibble."""

ELEMENTS: dict[torch.dtype | str, tl.dtype | int] = {
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
    "e2m1": E2M1.value,
    "e2m3": E2M3.value,
    "e3m2": E3M2.value,
}
"""An element as kernels take it: Triton's type, or a number."""


@triton.constexpr_function
def is_small(element):
    """Whether the hardware does not convert to the element."""
    return isinstance(element, int)


@triton.constexpr_function
def is_packed(element):
    """Whether two codes share a byte."""
    return isinstance(element, int) and element == 0


@triton.constexpr_function
def _mantissa(element):
    return (1, 3, 2)[element]


@triton.constexpr_function
def _bias(element):
    return (1, 1, 3)[element]


@triton.constexpr_function
def _max(element):
    return (6.0, 7.5, 28.0)[element]


@triton.jit
def codes_of(value, ELEMENT: tl.constexpr):
    """uint8 codes to nearest even. They saturate, and NaN has no sign."""
    if is_small(ELEMENT):
        codes = _small_codes(value, ELEMENT)
    else:
        codes = value.to(ELEMENT).to(tl.uint8, bitcast=True)
    return codes


@triton.jit
def _small_codes(value, ELEMENT: tl.constexpr):
    """NaN becomes the largest magnitude. Numbers below the least normal one are rounded by a sum with 2^23."""
    BITS: tl.constexpr = _mantissa(ELEMENT)
    BIAS: tl.constexpr = _bias(ELEMENT)
    DROPPED: tl.constexpr = 23 - BITS
    magnitude = tl.minimum(tl.abs(value), _max(ELEMENT))  # which drops NaN
    bits = magnitude.to(tl.int32, bitcast=True)
    bits += ((bits >> DROPPED) & 1) + (1 << (DROPPED - 1)) - 1
    normal = (bits >> DROPPED) - ((127 - BIAS) << BITS)
    below = (magnitude * 2.0 ** (BIAS - 1 + BITS) + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    code = tl.where(magnitude < 2.0 ** (1 - BIAS), below, normal)
    negative = (value.to(tl.int32, bitcast=True) < 0) & (value == value)
    SIGN: tl.constexpr = 8 if is_packed(ELEMENT) else 32
    return (code + tl.where(negative, SIGN, 0)).to(tl.uint8)
