"""Element codecs, and the stages of encode and decode that apply them: the meaning of all faster forms.

Rounding is to nearest, ties to even, saturating to the largest finite value (infinities too). The sign of zero is kept.
NaN becomes `nan_code`, without a sign.

Blocked tensors are (grid rows, rows, grid cols, cols), as `Block.view` makes them. A backend replaces a stage by a
subclass of `Stages` with the same bits; formats only order the stages.
"""

import struct
from dataclasses import dataclass, field

import torch
from torch import Tensor

from duotone.formats import hadamard, philox


def _where(mask: Tensor, value: float, other: Tensor | float) -> Tensor:
    return torch.where(mask, value, other)


class Constant(float):
    """A float that does not become a symbol in traces.

    torch 2.11 makes a symbol of each float in a plan, even if no op reads it, and then compiles again without it.
    """


@dataclass(frozen=True)
class Element:
    """A small float: sign, `exponent_bits`, `mantissa_bits`, exponent bias, largest finite value.

    `dtype` is the torch dtype with the same codes, if torch has one; its cast rounds as this codec does in range.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float = field(compare=False)
    nan_code: int
    dtype: torch.dtype | None = None
    bands: tuple[tuple[complex, complex, int], ...] = field(init=False, repr=False, compare=False)
    """(lower bound, step, code of the lower bound) of each run of evenly spaced magnitudes, smallest first."""
    exact_max: complex = field(init=False, repr=False)
    """`max`. Stages read its magnitude: traces make symbols of float attributes and of real parts."""
    reciprocal: complex = field(init=False, repr=False, compare=False)
    """1/max rounded to fp32."""
    sign_code: int = field(init=False, repr=False, compare=False)
    """The sign bit. It is a field: compiled code may treat the widths as symbols, and cannot shift by symbols."""
    largest_code: int = field(init=False, repr=False, compare=False)
    """The code of `max`."""
    bits: int = field(init=False, repr=False, compare=False)
    codes_per_byte: int = field(init=False, repr=False, compare=False)
    is_float: bool = field(init=False, repr=False, compare=False)
    """Whether the codes are small floats. The codes of an integer element are integers of torch."""
    has_nan: bool = field(init=False, repr=False, compare=False)
    """Whether one of the codes is NaN, so that a NaN survives the cast by itself."""
    stored_dtype: torch.dtype = field(init=False, repr=False, compare=False)
    """What the codes are viewed as inside the codec: the torch float8, or bytes."""

    def __post_init__(self) -> None:
        bits = 1 + self.exponent_bits + self.mantissa_bits
        is_float = self.dtype is None or self.dtype.is_floating_point
        bands = self._bands()
        lower, step, code = bands[-1]
        derived = {
            "max": Constant(self.max),
            "bands": bands,
            "largest_code": code + round((self.max - abs(lower)) / abs(step)) if is_float else int(self.max),
            "exact_max": complex(self.max),
            "reciprocal": complex(struct.unpack("f", struct.pack("f", 1.0 / self.max))[0]),
            "sign_code": 1 << (bits - 1),
            "bits": bits,
            "codes_per_byte": 2 if bits == 4 else 1,
            "is_float": is_float,
            "has_nan": self.dtype is not None and is_float,
            "stored_dtype": self.dtype or torch.uint8,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def _bands(self) -> tuple[tuple[complex, complex, int], ...]:
        rows = [(0.0, 2.0 ** (1 - self.bias - self.mantissa_bits), 0)]
        while self._top(rows[-1][1]) <= self.max:
            _, step, _ = rows[-1]
            rows.append((self._top(step), 2.0 * step, (len(rows) + 1) << self.mantissa_bits))
        return tuple([(complex(lower), complex(step), code) for lower, step, code in rows])

    def _top(self, step: float) -> float:
        return step * 2.0 ** (self.mantissa_bits + 1)

    def encode(self, values: Tensor) -> Tensor:
        """fp32 values of any shape -> uint8 codes, one to a byte."""
        return self.narrow(values).view(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """uint8 codes, one to a byte -> fp32 values, exactly."""
        return self.widen(codes.view(self.stored_dtype))

    def narrow(self, values: Tensor) -> Tensor:
        """fp32 values -> codes as `stored_dtype`."""
        values = values.clamp(-abs(self.exact_max), abs(self.exact_max))
        is_nan = values != values
        if self.dtype is not None:
            # The cast keeps the sign of NaN on some backends: only a positive NaN goes in.
            return values.masked_fill(is_nan, torch.nan).to(self.dtype)
        magnitude = values.abs()
        step_inverse, offset = self._select(magnitude)
        code = torch.round(magnitude * step_inverse) + offset
        negative = torch.copysign(torch.ones_like(values), values) < 0  # not signbit, which no backend vectorizes
        code = torch.where(negative, code + self.sign_code, code)
        return code.masked_fill(is_nan, float(self.nan_code)).to(torch.uint8)

    def widen(self, stored: Tensor) -> Tensor:
        """Codes as `stored_dtype` -> fp32 values."""
        if self.dtype is not None:
            return stored.to(torch.float32)
        code = stored.to(torch.float32)
        negative = code >= self.sign_code
        code = torch.where(negative, code - self.sign_code, code)
        value = code * abs(self.bands[0][1])
        for lower, step, first in self.bands[1:]:
            value = torch.where(code >= first, (code - first) * abs(step) + abs(lower), value)
        return torch.where(negative, -value, value)

    def round_stochastic(self, values: Tensor, bits: Tensor) -> Tensor:
        """fp32 values -> representable fp32 values. The 8 random `bits` of a value (0 to 255) decide if it rounds up.

        NaN becomes +max unless the element has a NaN, infinities +-max. Rule of the NVFP4 recipe:
        floor(v + bits/256 * step) on the grid.
        """
        magnitude = values.abs()
        dither = bits.to(torch.float32) * (1.0 / 256.0)
        shifted = magnitude + dither * self._step(magnitude)  # the product is exact: the step is a power of two
        step = self._step(shifted)
        rounded = (torch.floor(shifted / step) * step).clamp(max=abs(self.exact_max))
        nan = torch.nan if self.has_nan else abs(self.exact_max)
        return torch.copysign(rounded, values).masked_fill(values != values, nan)

    def _select(self, magnitude: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """1/step and code offset of each magnitude's band: code = round(magnitude / step) + offset."""
        inverse: Tensor | float = 1.0 / abs(self.bands[0][1])
        offset: Tensor | float = 0.0
        for lower, step, first in self.bands[1:]:
            above = magnitude >= abs(lower)
            inverse = _where(above, 1.0 / abs(step), inverse)
            offset = _where(above, first - abs(lower) / abs(step), offset)
        return inverse, offset

    def _step(self, magnitude: Tensor) -> Tensor:
        step = torch.full_like(magnitude, abs(self.bands[0][1]))
        for lower, width, _ in self.bands[1:]:
            step = step.masked_fill(magnitude >= abs(lower), abs(width))
        return step


E4M3 = Element("e4m3", 4, 3, 7, 448.0, 0x7F, torch.float8_e4m3fn)
E5M2 = Element("e5m2", 5, 2, 15, 57344.0, 0x7F, torch.float8_e5m2)
E2M3 = Element("e2m3", 2, 3, 1, 7.5, 0x1F)
E3M2 = Element("e3m2", 3, 2, 3, 28.0, 0x1F)
E2M1 = Element("e2m1", 2, 1, 1, 6.0, 0x7)
ELEMENTS = {element.name: element for element in (E4M3, E5M2, E2M3, E3M2, E2M1)}
FP8_DTYPES = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))
"""The codes that kernels and tensor cores know as FP8."""


def pack_pairs(codes: Tensor) -> Tensor:
    """4-bit codes (..., K) -> bytes (..., ceil(K/2)), the even element in the low nibble."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_pairs(packed: Tensor) -> Tensor:
    """bytes (..., K/2) -> 4-bit codes (..., K)."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


MANTISSA_MASK = 0x007FFFFF
EXPONENT_MASK = 0x7F800000
QUIET_NAN = 0x7FC00000
SMALLEST_POWER = 0x00400000
"""Bits of 2^-127, the power of two of the byte 0."""


def block_amax(blocks: Tensor, nan: float = 0.0) -> Tensor:
    """Blocked input -> fp32 (grid rows, grid cols): max |x|, 0 where a block is empty; NaN counts as `nan`."""
    if blocks.numel() == 0:
        return blocks.new_zeros((blocks.shape[0], blocks.shape[2]), dtype=torch.float32)
    magnitude = blocks.to(torch.float32).abs()
    return magnitude.masked_fill(magnitude != magnitude, nan).amax(dim=(1, 3))


def cast(blocks: Tensor, multiplier: Tensor, element: Element, marks: bool = False) -> Tensor:
    """Codes, one to a byte, of fl(x * multiplier) as the element's `stored_dtype`; `multiplier` fp32 broadcasts.

    With `marks`, infinities become NaN instead of the largest finite value.
    """
    x = blocks.to(torch.float32)
    if marks:
        x = x.masked_fill(torch.isinf(x), torch.nan)
    return element.narrow(x * multiplier)


def cast_stochastic(blocks: Tensor, multiplier: Tensor, bits: Tensor, element: Element) -> Tensor:
    """Like `cast`, but rounded stochastically by `bits`, uint8 of the blocks' shape."""
    return element.narrow(element.round_stochastic(blocks.to(torch.float32) * multiplier, bits))


def values(codes: Tensor, factor: Tensor, element: Element, dtype: torch.dtype) -> Tensor:
    """fl(value(code) * factor) in `dtype`; `codes` blocked, one to a byte, as the element's `stored_dtype`."""
    return (element.widen(codes) * factor).to(dtype)


def divide(numerator: Tensor | float, denominator: Tensor | float) -> Tensor:
    """The IEEE fp32 quotient, also if one side is a constant."""
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
        amax = amax.masked_fill(amax < epsilon, epsilon)
    scale = divide(largest, amax).nan_to_num(1.0, overflow)
    scale = scale.masked_fill(amax.nan_to_num(0.0, 0.0) == 0, 1.0)
    if to_power:
        scale = (scale.view(torch.int32) & EXPONENT_MASK).view(torch.float32)
    return scale, divide(1.0, scale)


def exponent_scale(amax: Tensor, reciprocal: float) -> tuple[Tensor, Tensor]:
    """fp32 amax of each block -> its E8M0 byte and the fp32 multiplier 2^(127 - byte).

    The byte is fl(amax * reciprocal) rounded up to a power of two: 254 for infinity, 255 for NaN. The mantissa is
    compared with 0: if it is added to a mask and shifted, inductor of torch 2.13 fails on a CPU.
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
    bits = (biased << 23).masked_fill(biased == 0, SMALLEST_POWER)
    return bits.masked_fill(biased & 0xFF == 0xFF, QUIET_NAN).view(torch.float32)


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
