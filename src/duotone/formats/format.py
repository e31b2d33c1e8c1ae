"""A format: element codec x block geometry x scale rule x transforms, as one frozen value."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from duotone.errors import UserError
from duotone.formats import hadamard, philox
from duotone.formats.checks import check_matrix, check_values, require_parts
from duotone.formats.elements import Element
from duotone.formats.geometry import Block, crop
from duotone.formats.parts import Factors, Parts, PartSpec, Shard
from duotone.formats.registry import get
from duotone.formats.scales import Blocked, Scaled
from duotone.formats.stages import PLAIN, Stages


class Format(Protocol):
    """What everything above `formats/` may ask. Matrices are 2-D with the contraction last."""

    @property
    def name(self) -> str: ...

    def with_epsilon(self, epsilon: float, name: str) -> "Format": ...

    @property
    def precision(self) -> int:
        """Bits of an element; dequantize prefers the plane with more."""
        ...

    @property
    def is_stochastic(self) -> bool: ...

    @property
    def is_delayed(self) -> bool:
        """Whether the scale comes from outside, out of a history of amaxes, instead of from the matrix."""
        ...

    @property
    def stored(self) -> tuple[Any, ...]:
        """What decides how parts are read. Formats that share it differ in how the next write finds its scales."""
        ...

    @property
    def largest(self) -> float:
        """The largest magnitude of an element."""
        ...

    @property
    def code_dtype(self) -> torch.dtype | None:
        """The torch dtype of the codes, where there is one and codes fill bytes."""
        ...

    @property
    def family(self) -> str:
        """What a tensor core needs equal in both operands: kind of scale, block width, transform."""
        ...

    @property
    def alignment(self) -> tuple[int, int]:
        """Rows and columns at whose multiples a matrix may be cut without cutting a block."""
        ...

    @property
    def transform(self) -> str:
        """Name of the transform along the contraction ("" for none); the operands of a GEMM must agree in it."""
        ...

    @property
    def outer_extent(self) -> str:
        """Where the factor that follows the product lives: "none", "tensor", "row", "block" or "high precision"."""
        ...

    @property
    def outer_block(self) -> Block: ...

    @property
    def spans_rows(self) -> bool:
        """Whether a scale spans all rows, so that shards of a tensor have to agree on it."""
        ...

    @property
    def scale_codec(self) -> str:
        """How scales are stored: "fp32", "power of two", "e8m0", "two-level" (E4M3 under an fp32 amax); "" for none."""
        ...

    @property
    def scale_search(self) -> str:
        """The error by which a block chooses between two scales, "mae" or "mse"; "" where its amax decides."""
        ...

    def scale_limits(self, dtype: torch.dtype) -> tuple[float, float, float]:
        """What kernels make scales of for an input dtype: the largest element (under E8M0 its reciprocal, under two
        levels times the largest block scale), what a scale becomes that overflows, the amax below which none counts."""
        ...

    def parts(self, rows: int, cols: int) -> dict[str, PartSpec]: ...

    def encode(
        self,
        x: Tensor,
        *,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
        seed: Tensor | int | None = None,
        plane: str = "row",
        shard: Shard | None = None,
        stages: Stages = PLAIN,
        propagate: bool = False,
    ) -> Parts: ...

    def decode(self, parts: Parts, dtype: torch.dtype, stages: Stages = PLAIN) -> Tensor: ...

    def rotate(self, x: Tensor) -> Tensor: ...

    def unrotate(self, values: Tensor, cols: int) -> Tensor: ...

    def ceiling(self, parts: Parts) -> Tensor: ...

    def factors(self, parts: Parts, stages: Stages = PLAIN, inner: Tensor | None = None) -> Factors: ...

    def derive(self, parts: Parts, cols: int | None = None) -> Parts | None: ...

    @property
    def is_derivable(self) -> bool: ...

    def describe(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class ScaledFormat:
    """Codes of a small element under scales: every format but Identity is a row of these fields."""

    name: str
    element: Element
    block: Block
    rule: Any
    hadamard: bool = False
    is_stochastic: bool = False
    is_delayed: bool = False
    outer_extent: str = field(init=False, repr=False, compare=False)
    part_names: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "outer_extent", self.rule.outer_extent(self.block))
        object.__setattr__(self, "part_names", tuple(self.parts(1, 1)))

    def __reduce__(self) -> Any:
        # By name: a pickle from another version never carries stale fields.
        return get, (self.name,)

    def __deepcopy__(self, memo: Any) -> "ScaledFormat":
        return self

    def with_epsilon(self, epsilon: float, name: str) -> "ScaledFormat":
        """The format whose amaxes count as at least `epsilon`. UserError where its scales know no such floor."""
        if not hasattr(self.rule, "epsilon") or self.is_delayed:
            raise UserError(f"{self.name} has no amax floor; choose a format with fp32 scales")
        return replace(self, name=name, rule=replace(self.rule, epsilon=epsilon))

    @property
    def stored(self) -> tuple[Any, ...]:
        return self.element, self.block, self.hadamard, self.is_stochastic, getattr(self.rule, "stored", self.rule)

    @property
    def precision(self) -> int:
        return self.element.bits

    @property
    def largest(self) -> float:
        return self.element.max

    @property
    def code_dtype(self) -> torch.dtype | None:
        return self.element.dtype

    @property
    def scale_codec(self) -> str:
        return self.rule.codec

    @property
    def scale_search(self) -> str:
        return self.rule.search

    def scale_limits(self, dtype: torch.dtype) -> tuple[float, float, float]:
        return self.rule.limits(self.element, dtype)

    @property
    def family(self) -> str:
        width = self.block.cols or "whole"
        integers = "" if self.element.is_float else "integers under "
        return f"{integers}{self.rule.family} scales over {width}{' rotated' if self.hadamard else ''}"

    @property
    def transform(self) -> str:
        return f"hadamard{hadamard.SIZE}:{hadamard.SIGN_MASK:04x}" if self.hadamard else ""

    @property
    def outer_block(self) -> Block:
        return self.block

    @property
    def spans_rows(self) -> bool:
        return any(spec.rows_per_entry is None for spec in self.parts(1, 1).values())

    @property
    def alignment(self) -> tuple[int, int]:
        return self.block.rows or 1, math.lcm(self.block.cols or 1, self.element.codes_per_byte)

    @property
    def is_derivable(self) -> bool:
        return self.block.transposes and not self.hadamard

    def parts(self, rows: int, cols: int) -> dict[str, PartSpec]:
        """Name -> buffer of the encoding of a (rows, cols) matrix."""
        cols = self._stored_cols(cols)
        per_byte = self.element.codes_per_byte
        codes = PartSpec((rows, -(-cols // per_byte)), torch.uint8, 1, per_byte)
        return {"codes": codes, **self.rule.specs(self.block, rows, cols)}

    def encode(
        self,
        x: Tensor,
        *,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
        seed: Tensor | int | None = None,
        plane: str = "row",
        shard: Shard | None = None,
        stages: Stages | None = None,
        propagate: bool = False,
    ) -> Parts:
        """(M, K) bf16, fp16 or fp32 -> parts.

        `scale` is an encode scale from outside (fp32 scales only), `amax` a global amax from outside (formats whose
        scale spans the tensor or its rows), `seed` an int64 for stochastic rounding, `plane` "row" or "col" its stream.
        With `shard`, amaxes that span the sharded dimension are those of all shards. A caller that chooses `stages`
        answers for the values of `scale` and `amax`; another one is refused what is NaN or negative, and a scale of 0.
        Infinities saturate, and NaN becomes the element's `nan_code`. With `propagate`, what is not finite makes every
        product non-finite that reads it: its code is NaN, or the scale of its block is.
        """
        self._check(x, scale, amax, seed, plane)
        if stages is None:
            check_values(self.name, scale, amax)
            stages = PLAIN
        if self.hadamard:
            x = stages.rotate(x)
        rows, cols = x.shape
        blocks = self.block.view(x)
        is_scaled = scale is not None or self.is_delayed
        nan = math.inf if propagate and not self.element.has_nan else 0.0
        amaxes = blocks.new_empty(self.block.grid(rows, cols)) if is_scaled else stages.amax(blocks, nan)
        given = Blocked(blocks, amaxes, self.element, self.block, (rows, cols), x.dtype, stages, shard, propagate)
        scaled = self._scale(given, scale, amax)
        multiplier = scaled.multiplier[:, None, :, None]
        marks = propagate and is_scaled
        if self.is_stochastic:
            bits = stages.random_bytes(_as_seed(seed, x.device), rows, cols, philox.PLANES[plane])
            blocks = torch.where(torch.isinf(blocks), torch.nan, blocks) if marks else blocks
            codes = stages.cast_stochastic(blocks, multiplier, self.block.view(bits), self.element)
        else:
            codes = stages.cast(blocks, multiplier, self.element, marks)
        codes = self.block.unview(codes.view(torch.uint8), rows, cols)
        return {"codes": stages.pack(codes) if self.element.codes_per_byte == 2 else codes, **scaled.parts}

    def decode(self, parts: Parts, dtype: torch.dtype, stages: Stages = PLAIN) -> Tensor:
        """The values that a GEMM multiplies, (M, K): rotated for Hadamard formats, which keep the padded length."""
        require_parts(self.name, self.part_names, parts)
        return self._values(parts, dtype, self.rule.factor, stages)

    def rotate(self, x: Tensor) -> Tensor:
        """The matrix whose elements the codes stand for: x itself, or its Hadamard transform."""
        return hadamard.rotate(x) if self.hadamard else x

    def ceiling(self, parts: Parts) -> Tensor:
        """fp32 (M, K): the largest magnitude that each element can hold under its scale."""
        codes = self._unpacked(parts["codes"], PLAIN)
        largest = self.element.encode(torch.full((1,), self.element.max, device=codes.device)).expand_as(codes)
        return self.decode({**parts, "codes": self._packed(largest)}, torch.float32)

    def unrotate(self, values: Tensor, cols: int) -> Tensor:
        """Decoded values -> those of the original (M, cols), in the same dtype."""
        if self.hadamard:
            values = hadamard.unrotate(values).to(values.dtype)
        return crop(values, values.shape[0], cols)

    def factors(self, parts: Parts, stages: Stages = PLAIN, inner: Tensor | None = None) -> Factors:
        """`decode` split into an operand that is exact in bf16, unless given, and what must follow the product."""
        if inner is None:
            inner = self._values(parts, torch.bfloat16, self.rule.inner, stages)
        return Factors(inner, self.rule.outer(parts), self.rule.divisor)

    def derive(self, parts: Parts, cols: int | None = None) -> Parts | None:
        """The parts of the transpose, without loss, or None where its scales are others.

        `cols` is the matrix's own number of columns where packed codes round it up to even.
        """
        if not self.is_derivable:
            return None
        require_parts(self.name, self.part_names, parts)
        codes = self._unpacked(parts["codes"], PLAIN)[:, :cols]
        shape = (codes.shape[0], codes.shape[1])
        return {"codes": self._packed(codes.t()), **self.rule.transpose(parts, self.block, shape)}

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "element": self.element.name,
            "block": self.block.name,
            "scale": f"{self.rule.name}, from a history" if self.is_delayed else self.rule.name,
            "transform": self.transform,
            "rounding": "stochastic" if self.is_stochastic else "nearest",
            "columnwise": "transposed" if self.is_derivable else "encoded",
            "bits_per_element": round(self._bits_per_element(), 4),
        }

    def _scale(self, given: Blocked, scale: Tensor | None, amax: Tensor | None) -> Scaled:
        if scale is not None:
            return self.rule.given(scale, given)
        if self.is_delayed:
            return self.rule.given(torch.ones_like(given.amax), given)
        if amax is None:
            return self.rule.decide(given)
        if "amax" in self.parts(1, 1):
            return self.rule.decide(given, amax)
        return self.rule.decide(given._replace(shard=None, amax=amax.to(torch.float32).reshape(given.amax.shape)))

    def _values(self, parts: Parts, dtype: torch.dtype, factor_of: Any, stages: Stages) -> Tensor:
        codes = self._unpacked(parts["codes"], stages)
        shape = (codes.shape[0], codes.shape[1])
        block = self.rule.stored_block(self.block)
        factor = factor_of(parts, self.block, shape)
        if factor is None:
            factor = torch.ones((1, 1, 1, 1), dtype=torch.float32, device=codes.device)
        stored = block.view(codes).view(self.element.stored_dtype)
        return block.unview(stages.values(stored, factor, self.element, dtype), *shape)

    def _unpacked(self, codes: Tensor, stages: Stages) -> Tensor:
        return stages.unpack(codes) if self.element.codes_per_byte == 2 else codes

    def _packed(self, codes: Tensor) -> Tensor:
        return PLAIN.pack(codes) if self.element.codes_per_byte == 2 else codes

    def _stored_cols(self, cols: int) -> int:
        return -(-cols // hadamard.SIZE) * hadamard.SIZE if self.hadamard else cols

    def _bits_per_element(self) -> float:
        """Of a 4096 x 4096 matrix, everything counted."""
        specs = self.parts(4096, 4096).values()
        return sum(8 * math.prod(s.shape) * s.dtype.itemsize for s in specs if s.dtype is not None) / 4096**2

    def _check(
        self, x: Tensor, scale: Tensor | None, amax: Tensor | None, seed: Tensor | int | None, plane: str
    ) -> None:
        check_matrix(self.name, x, plane)
        if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise UserError(f"{self.name} encodes bf16, fp16 and fp32; got {x.dtype}: cast it first")
        if self.is_stochastic and seed is None:
            raise UserError(f"{self.name} rounds stochastically and needs a seed; pass seed=<64-bit integer>")
        if scale is not None and amax is not None:
            raise UserError("scale and amax were both given; pass the one that decides")
        if scale is not None:
            if not self.rule.accepts_scale:
                raise UserError(f"{self.name} makes its own {self.rule.name} scales; omit scale=")
            self._check_count("scale", scale, self.parts(*x.shape)["scale"].shape)
        if amax is not None:
            if not self._takes_amax():
                raise UserError(f"{self.name} takes the amax of each block itself; omit amax=")
            specs = self.parts(*x.shape)
            self._check_count("amax", amax, specs.get("amax", specs["scale"]).shape)

    def _check_count(self, what: str, given: Any, shape: tuple[int, ...]) -> None:
        if not isinstance(given, Tensor) or given.numel() != math.prod(shape):
            got = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise UserError(f"{self.name} takes {what} as a tensor of shape {shape} for this input; got {got}")

    def _takes_amax(self) -> bool:
        return "amax" in self.parts(1, 1) or self.block.name in ("tensor", "row")


def _as_seed(seed: Tensor | int | None, device: torch.device) -> Tensor:
    if isinstance(seed, Tensor) and seed.numel() == 1 and seed.dtype == torch.int64:
        return seed.to(device=device)
    if not isinstance(seed, int):
        got = f"a {seed.dtype} tensor of {seed.numel()}" if isinstance(seed, Tensor) else type(seed).__name__
        raise UserError(f"a seed is an integer or an int64 tensor with one element; got {got}")
    signed = (seed + 2**63) % 2**64 - 2**63  # the 64 bits of the seed as an int64
    return torch.tensor([signed], dtype=torch.int64, device=device)
