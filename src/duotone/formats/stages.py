"""The steps of encode and decode that touch every element, in plain torch: the meaning that every faster form keeps.

Blocked tensors are (grid rows, rows, grid cols, cols), as `Block.view` makes them. A backend replaces a stage by a
subclass of `Stages` with the same bits; formats only order the stages.
"""

import torch
from torch import Tensor

from duotone.formats import hadamard, philox
from duotone.formats.elements import Element, pack_pairs, unpack_pairs

MANTISSA_MASK = 0x007FFFFF
EXPONENT_MASK = 0x7F800000
QUIET_NAN = 0x7FC00000


def block_amax(blocks: Tensor, nan: float = 0.0) -> Tensor:
    """Blocked input -> fp32 (grid rows, grid cols): max |x|, 0 where a block is empty; NaN counts as `nan`."""
    if blocks.numel() == 0:
        return blocks.new_zeros((blocks.shape[0], blocks.shape[2]), dtype=torch.float32)
    magnitude = blocks.to(torch.float32).abs()
    return torch.where(magnitude == magnitude, magnitude, nan).amax(dim=(1, 3))


def cast(blocks: Tensor, multiplier: Tensor, element: Element, marks: bool = False) -> Tensor:
    """Codes, one to a byte, of fl(x * multiplier) as the element's `stored_dtype`; `multiplier` fp32 broadcasts.

    With `marks`, infinities become NaN instead of the largest finite value.
    """
    x = blocks.to(torch.float32)
    if marks:
        x = torch.where(torch.isinf(x), torch.nan, x)
    return element.narrow(x * multiplier)


def cast_stochastic(blocks: Tensor, multiplier: Tensor, bits: Tensor, element: Element) -> Tensor:
    """As `cast`, rounding with `bits` uint8 of the blocks' shape."""
    return element.narrow(element.round_stochastic(blocks.to(torch.float32) * multiplier, bits))


def values(codes: Tensor, factor: Tensor, element: Element, dtype: torch.dtype) -> Tensor:
    """fl(value(code) * factor) in `dtype`; `codes` blocked, one to a byte, as the element's `stored_dtype`."""
    return (element.widen(codes) * factor).to(dtype)


def divide(numerator: Tensor | float, denominator: Tensor | float) -> Tensor:
    """The IEEE fp32 quotient, also where one side is a constant."""
    if not isinstance(numerator, Tensor):
        assert isinstance(denominator, Tensor)
        numerator = torch.full_like(denominator, numerator)
    if not isinstance(denominator, Tensor):
        denominator = torch.full_like(numerator, denominator)
    return numerator / denominator


def fp32_scale(amax: Tensor, largest: float, overflow: float, epsilon: float, to_power: bool) -> tuple[Tensor, Tensor]:
    """fp32 amaxes -> the encode scales largest / max(amax, epsilon), and fl(1/scale), which is stored.

    A quotient that overflows is `overflow`; 1 where amax is 0 or not finite; `to_power` rounds down to a power of two.
    """
    if epsilon:
        amax = torch.where(amax < epsilon, epsilon, amax)
    scale = divide(largest, amax)
    scale = torch.where(torch.isinf(scale), overflow, scale)
    scale = torch.where((amax == 0) | ~torch.isfinite(amax), 1.0, scale)
    if to_power:
        scale = (scale.view(torch.int32) & EXPONENT_MASK).view(torch.float32)
    return scale, divide(1.0, scale)


def exponent_scale(amax: Tensor, reciprocal: float) -> tuple[Tensor, Tensor]:
    """fp32 amax of each block -> its E8M0 byte and the fp32 multiplier 2^(127 - byte).

    The byte is fl(amax * reciprocal) rounded up to a power of two: 254 for infinity, 255 for NaN.
    """
    ratio = (amax * reciprocal).view(torch.int32)
    exponent, mantissa = ratio >> 23, ratio & MANTISSA_MASK
    code = (exponent + (mantissa > 0).to(torch.int32)).clamp(max=254)
    code = torch.where(exponent == 0, (mantissa > 0x400000).to(torch.int32), code)
    code = torch.where((exponent == 255) & (mantissa > 0), 255, code)
    bits = torch.where(code == 254, 0x00400000, (254 - code) << 23)
    return code.to(torch.uint8), torch.where(code == 255, QUIET_NAN, bits).to(torch.int32).view(torch.float32)


def power_of_two(biased: Tensor) -> Tensor:
    """int32 -> fp32 2^(biased - 127); 0 is the subnormal 2^-127; 255, and -1 as its inverse, are NaN."""
    bits = torch.where(biased == 0, 0x00400000, biased << 23)
    return torch.where((biased == 255) | (biased < 0), QUIET_NAN, bits).to(torch.int32).view(torch.float32)


class Stages:
    """The plain-torch stages. Stateless; plans show the `name` of the backend that casts."""

    name = "torch"
    amax = staticmethod(block_amax)
    cast = staticmethod(cast)
    cast_stochastic = staticmethod(cast_stochastic)
    values = staticmethod(values)
    fp32_scale = staticmethod(fp32_scale)
    exponent_scale = staticmethod(exponent_scale)
    rotate = staticmethod(hadamard.rotate)
    random_bytes = staticmethod(philox.random_bytes)
    pack = staticmethod(pack_pairs)
    unpack = staticmethod(unpack_pairs)


PLAIN = Stages()
