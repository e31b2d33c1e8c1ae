"""Scales inside of kernels: factors and stored scales from amaxes, by the rules of `formats.elements`."""

import triton
import triton.language as tl

from duotone.formats import ScaleCodec

FP32, POWER, E8M0 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Codecs of a scale: fp32, the power of two below it, an exponent byte."""

HIDES = tl.constexpr(4)
"""Added to a codec: the scale of an infinite amax is stored like a finite one, not as NaN."""

CODECS = {ScaleCodec.FP32: FP32.value, ScaleCodec.POWER_OF_TWO: POWER.value, ScaleCodec.E8M0: E8M0.value}


@triton.constexpr_function
def kind(codec):
    """The codec without HIDES."""
    return codec % 4


@triton.constexpr_function
def hides(codec):
    """Whether HIDES was added."""
    return codec >= 4


@triton.jit
def fp32_scale(amax, largest, overflow, epsilon, CODEC: tl.constexpr):
    """largest / max(amax, epsilon) as an IEEE quotient. An infinite one is `overflow`; 1 if amax is 0 or not finite.

    The power of two below the quotient follows from the exponents and a comparison of the mantissas: a quotient of
    mantissas below 1 is at most 1 - 2^-24 and never rounds to 1.
    """
    value = tl.where(amax < epsilon, epsilon, amax)
    if kind(CODEC) == POWER:
        bits, top = value.to(tl.int32, bitcast=True), largest.to(tl.int32, bitcast=True)
        smaller = ((bits & 0x007FFFFF) > (top & 0x007FFFFF)).to(tl.int32)
        field = 127 + (top >> 23) - (bits >> 23) - smaller
        limit = overflow.to(tl.int32, bitcast=True) & 0x7F800000
        result = tl.where((field > 254) | (bits < 0x00800000), limit, field << 23).to(tl.float32, bitcast=True)
    else:
        result = tl.div_rn(value * 0.0 + largest, value)
        result = tl.where(result == float("inf"), overflow, result)
    return tl.where((value > 0.0) & (value < float("inf")), result, 1.0)


@triton.jit
def exponent(amax, reciprocal, CAPPED: tl.constexpr):
    """The biased exponent of amax * reciprocal, rounded up to a power of two: 255 for NaN and infinity, or with CAPPED
    254 for infinity."""
    ratio = (amax * reciprocal).to(tl.int32, bitcast=True)
    field, mantissa = ratio >> 23, ratio & 0x007FFFFF
    result = field + (mantissa > 0).to(tl.int32)
    result = tl.minimum(result, 254 if CAPPED else 255)  # no finite ratio reaches it
    result = tl.where(field == 0, (mantissa > 0x400000).to(tl.int32), result)
    if CAPPED:
        result = tl.where((field == 255) & (mantissa > 0), 255, result)
    return result


@triton.jit
def power_of_two(biased):
    """int32 -> fp32 2^(biased - 127); 0 is the subnormal 2^-127; 255, and -1 as its inverse, are NaN."""
    bits = tl.where(biased == 0, 0x00400000, biased << 23)
    return tl.where((biased == 255) | (biased < 0), 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def given_scale(scale, CODEC: tl.constexpr):
    """An encode scale from outside, rounded down to a power of two where the codec is one."""
    if kind(CODEC) == POWER:
        result = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    else:
        result = scale
    return result


@triton.jit
def encode_scale(amax, limits, CODEC: tl.constexpr):
    """The multiplier of elements.

    `limits` are the element's largest value (its reciprocal for E8M0), the scale in place of one that overflows, and
    the least amax that counts.
    """
    largest, overflow, epsilon = limits
    if kind(CODEC) == E8M0:
        result = power_of_two(254 - exponent(amax, largest, hides(CODEC)))
    else:
        result = fp32_scale(amax, largest, overflow, epsilon, CODEC)
    return result


@triton.jit
def stored_scale(amax, result, largest, CODEC: tl.constexpr):
    """The stored scale: fl(1/scale), or the exponent byte. An infinite amax makes it NaN, so that products are not
    finite, unless the codec HIDES that. A scale from outside may stand in for its amax."""
    if kind(CODEC) == E8M0:
        stored = exponent(amax, largest, hides(CODEC)).to(tl.uint8)
    else:
        if kind(CODEC) == POWER:
            bits = 0x7F000000 - result.to(tl.int32, bitcast=True)  # the exponent of the inverse
            # The inverse of 2^127 is subnormal.
            stored = tl.maximum(bits, 0x00400000).to(tl.float32, bitcast=True)
        else:
            stored = tl.div_rn(result * 0.0 + 1.0, result)
        if not hides(CODEC):
            stored = tl.fma(amax, 0.0, stored)  # one operation, which no finite amax changes
    return stored


@triton.jit
def marked(value):
    """`value`, and NaN for infinities: one operation, which keeps the sign of zero."""
    return tl.fma(value, 0.0, value)


@triton.jit
def marked_four(values, MARKS: tl.constexpr):
    """Four tensors, `marked` with MARKS."""
    if MARKS:
        v0, v1, v2, v3 = values
        values = (marked(v0), marked(v1), marked(v2), marked(v3))
    return values
