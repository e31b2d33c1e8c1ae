"""Element codecs: fp32 values to codes of 4, 6 or 8 bits and back, written once over data.

Rounding is to nearest, ties to even, saturating to the largest finite value (infinities too). The sign of zero is kept.
NaN becomes `nan_code`, without a sign.
"""

import struct
from dataclasses import dataclass, field

import torch
from torch import Tensor


def _where(mask: Tensor, value: float, other: Tensor | float) -> Tensor:
    return torch.where(mask, value, other)


@dataclass(frozen=True)
class Element:
    """A small float: sign, `exponent_bits`, `mantissa_bits`, exponent bias, largest finite value.

    `dtype` names the torch dtype with the same codes, where there is one; its cast rounds as this codec does in range.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    nan_code: int
    dtype: torch.dtype | None = None
    bands: tuple[tuple[float, float, int], ...] = field(init=False, repr=False, compare=False)
    """(lower bound, step, code of the lower bound) of each run of evenly spaced magnitudes, smallest first."""
    reciprocal: float = field(init=False, repr=False, compare=False)
    """1/max rounded to fp32."""
    sign_code: int = field(init=False, repr=False, compare=False)
    """The sign bit. A field, not a property: compiled code may treat the widths as symbols and not shift by them."""
    bits: int = field(init=False, repr=False, compare=False)
    codes_per_byte: int = field(init=False, repr=False, compare=False)
    is_float: bool = field(init=False, repr=False, compare=False)
    """Whether the codes are small floats; those of an integer element are integers of torch."""
    has_nan: bool = field(init=False, repr=False, compare=False)
    """Whether one of the codes is NaN, so that a NaN survives the cast by itself."""
    stored_dtype: torch.dtype = field(init=False, repr=False, compare=False)
    """What the codes are viewed as inside the codec: the torch float8, or bytes."""

    def __post_init__(self) -> None:
        bits = 1 + self.exponent_bits + self.mantissa_bits
        is_float = self.dtype is None or self.dtype.is_floating_point
        derived = {
            "bands": self._bands(),
            "reciprocal": struct.unpack("f", struct.pack("f", 1.0 / self.max))[0],
            "sign_code": 1 << (bits - 1),
            "bits": bits,
            "codes_per_byte": 2 if bits == 4 else 1,
            "is_float": is_float,
            "has_nan": self.dtype is not None and is_float,
            "stored_dtype": self.dtype or torch.uint8,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def _bands(self) -> tuple[tuple[float, float, int], ...]:
        rows = [(0.0, 2.0 ** (1 - self.bias - self.mantissa_bits), 0)]
        while self._top(rows[-1][1]) <= self.max:
            _, step, _ = rows[-1]
            rows.append((self._top(step), 2.0 * step, (len(rows) + 1) << self.mantissa_bits))
        return tuple(rows)

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
        values = values.clamp(-self.max, self.max)
        is_number = values == values
        if self.dtype is not None:
            # The cast keeps the sign of NaN on some backends: only a positive NaN goes in.
            return torch.where(is_number, values, float("nan")).to(self.dtype)
        magnitude = values.abs()
        step_inverse, offset = self._select(magnitude)
        code = torch.round(magnitude * step_inverse) + offset
        negative = torch.copysign(torch.ones_like(values), values) < 0  # signbit, which no backend vectorizes
        code = torch.where(negative, code + self.sign_code, code)
        return torch.where(is_number, code, float(self.nan_code)).to(torch.uint8)

    def widen(self, stored: Tensor) -> Tensor:
        """Codes as `stored_dtype` -> fp32 values."""
        if self.dtype is not None:
            return stored.to(torch.float32)
        code = stored.to(torch.float32)
        negative = code >= self.sign_code
        code = torch.where(negative, code - self.sign_code, code)
        value = code * self.bands[0][1]
        for lower, step, first in self.bands[1:]:
            value = torch.where(code >= first, (code - first) * step + lower, value)
        return torch.where(negative, -value, value)

    def round_stochastic(self, values: Tensor, bits: Tensor) -> Tensor:
        """fp32 values -> representable fp32 values; each rounds up when its 8 random `bits` (0 to 255) carry it there.

        NaN becomes +max unless the element has a NaN, infinities +-max. Rule of the NVFP4 recipe:
        floor(v + bits/256 * step) on the grid.
        """
        magnitude = values.abs()
        dither = bits.to(torch.float32) * (1.0 / 256.0)
        shifted = magnitude + dither * self._step(magnitude)  # the product is exact: the step is a power of two
        step = self._step(shifted)
        rounded = (torch.floor(shifted / step) * step).clamp(max=self.max)
        nan = torch.nan if self.has_nan else self.max
        return torch.where(values == values, torch.copysign(rounded, values), nan)

    def _select(self, magnitude: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """1/step and code offset of each magnitude's band: code = round(magnitude / step) + offset."""
        inverse: Tensor | float = 1.0 / self.bands[0][1]
        offset: Tensor | float = 0.0
        for lower, step, first in self.bands[1:]:
            above = magnitude >= lower
            inverse = _where(above, 1.0 / step, inverse)
            offset = _where(above, first - lower / step, offset)
        return inverse, offset

    def _step(self, magnitude: Tensor) -> Tensor:
        step = torch.full_like(magnitude, self.bands[0][1])
        for lower, width, _ in self.bands[1:]:
            step = torch.where(magnitude >= lower, width, step)
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
