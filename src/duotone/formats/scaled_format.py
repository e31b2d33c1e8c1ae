"""ScaledFormat: element codec x block geometry x scale rule x transform, as one frozen value."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from duotone.errors import UserError
from duotone.formats import hadamard, philox
from duotone.formats.elements import PLAIN, Element, Stages
from duotone.formats.format import Format, check_matrix, require_parts
from duotone.formats.geometry import ROW, TENSOR, Block, Factors, Parts, PartSpec
from duotone.formats.registry import get
from duotone.formats.scale_rule import Blocked, Epilogue, Scaled, ScaleRule


@dataclass(frozen=True, repr=False, eq=False)
class ScaledFormat(Format):
    """Codes of a small element under scales: every format but Identity is a row of these fields."""

    name: str
    element: Element
    block: Block
    rule: ScaleRule
    hadamard: bool = False
    is_stochastic: bool = False
    is_delayed: bool = False
    part_names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    stored_block: Block = field(init=False, repr=False, compare=False)
    """The block that one stored scale covers."""

    def __post_init__(self) -> None:
        element, block, rule = self.element, self.block, self.rule
        specs = self.parts(1, 1)
        integers = "" if element.is_float else "integers under "
        derived = {
            "part_names": tuple(specs),
            "stored_block": rule.stored_block(block),
            "precision": element.bits,
            "largest": element.max,
            "code_dtype": element.dtype,
            "scale_codec": rule.codec,
            "scale_search": rule.search,
            "epilogue": rule.epilogue(block),
            "family": f"{integers}{rule.codec.family} scales over {block.cols or 'whole'}{' rotated' * self.hadamard}",
            "transform": hadamard.NAME * self.hadamard,
            "alignment": (block.rows or 1, math.lcm(block.cols or 1, element.codes_per_byte)),
            "is_derivable": block.transposes and not self.hadamard,
            "scales_by_tensor": block == TENSOR and element.has_nan and not (self.hadamard or self.is_delayed),
            "divisor": rule.divisor,
            "stored": (element, block, self.hadamard, self.is_stochastic, rule.stored),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        # Names first: a trace knows them as constants, but numbers of the fields may become inputs of its graph.
        if self is other or not isinstance(other, ScaledFormat):
            return self is other
        return self.name == other.name and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self.name)

    def _fields(self) -> tuple[object, ...]:
        return self.element, self.block, self.rule, self.hadamard, self.is_stochastic, self.is_delayed

    def __reduce__(self) -> tuple[Callable[[str], Format], tuple[str]]:
        # By name: a pickle from another version never carries stale fields.
        return get, (self.name,)

    def with_epsilon(self, epsilon: float, name: str) -> Format:
        rule = None if self.is_delayed else self.rule.with_floor(epsilon)
        return super().with_epsilon(epsilon, name) if rule is None else replace(self, name=name, rule=rule)

    def tiled(self, rows: int, cols: int) -> Format:
        return _tiled(self, rows, cols) if self.block == TENSOR else self

    def scale_limits(self, dtype: torch.dtype) -> tuple[float, float, float]:
        return self.rule.limits(self.element, dtype)

    def parts(self, rows: int, cols: int) -> dict[str, PartSpec]:
        cols = -(-cols // hadamard.SIZE) * hadamard.SIZE if self.hadamard else cols
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
        stages: Stages | None = None,
        propagate: bool = False,
    ) -> Parts:
        check_request(self, x, plane, scale, amax, seed)
        if stages is None:
            check_values(self.name, scale, amax)
            stages = PLAIN
        if self.hadamard:
            x = stages.rotate(x)
        rows, cols = x.shape
        blocks = self.block.view(x)
        is_scaled = scale is not None or self.is_delayed
        is_given = is_scaled or (amax is not None and "amax" not in self.part_names)
        amaxes = blocks.new_empty(self.block.grid(rows, cols)) if is_given else self._amaxes(blocks, stages, propagate)
        blocked = Blocked(blocks, amaxes, self.element, self.block, (rows, cols), x.dtype, stages, propagate)
        plain = scale is amax is None and not self.is_delayed
        scaled = self.rule.from_amax(blocked) if plain else self._scale(blocked, scale, amax)
        multiplier = scaled.multiplier[:, None, :, None]
        marks = propagate and is_scaled
        if seed is not None and self.is_stochastic:
            bits = stages.random_bytes(philox.as_seed(seed, x.device), rows, cols, philox.PLANES[plane])
            blocks = blocks.masked_fill(torch.isinf(blocks), torch.nan) if marks else blocks
            codes = stages.cast_stochastic(blocks, multiplier, self.block.view(bits), self.element)
        else:
            codes = stages.cast(blocks, multiplier, self.element, marks)
        codes = codes.view(torch.uint8)
        whole = codes.numel() == x.numel()  # no block is ragged
        codes = codes.reshape(rows, cols) if whole else self.block.unview(codes, rows, cols)
        if self.element.codes_per_byte == 2:
            codes = stages.pack(codes)
        return {"codes": codes, **scaled.parts}

    def shared_amax(self, x: Tensor, dim: int, stages: Stages = PLAIN, propagate: bool = False) -> Tensor | None:
        if not self.spans(dim):
            return None
        blocks = self.block.view(stages.rotate(x) if self.hadamard else x)
        return self.rule.global_amax(self._amaxes(blocks, stages, propagate))

    def _amaxes(self, blocks: Tensor, stages: Stages, propagate: bool) -> Tensor:
        """The amax of each block (grid)."""
        return stages.amax(blocks, math.inf if propagate and not self.element.has_nan else 0.0)

    def decode(self, parts: Parts, dtype: torch.dtype, stages: Stages | None = None) -> Tensor:
        require_parts(self, parts)
        if stages is None:
            check_sizes(self, parts)
            stages = PLAIN
        return self._values(parts, dtype, self.rule.factor, stages)

    def rotate(self, x: Tensor) -> Tensor:
        return hadamard.rotate(x) if self.hadamard else x

    def unrotate(self, values: Tensor, cols: int) -> Tensor:
        return super().unrotate(hadamard.unrotate(values).to(values.dtype) if self.hadamard else values, cols)

    def ceiling(self, parts: Parts) -> Tensor:
        byte = self.element.largest_code * (17 if self.element.codes_per_byte == 2 else 1)
        codes = torch.full_like(parts["codes"].view(torch.uint8), byte)  # codes may have the dtype of their element
        return self.decode({**parts, "codes": codes}, torch.float32)

    def factors(self, parts: Parts, stages: Stages = PLAIN, values: Tensor | None = None) -> Factors:
        if values is None:
            values = self._values(parts, torch.bfloat16, self.rule.codes_scale, stages)
        rule = self.rule
        return Factors(
            values, None if self.epilogue is Epilogue.NONE else rule.epilogue_scale(parts), abs(self.divisor)
        )

    def derive(self, parts: Parts, cols: int | None = None) -> Parts | None:
        if not self.is_derivable:
            return None
        require_parts(self, parts)
        packed = self.element.codes_per_byte == 2
        codes = (PLAIN.unpack(parts["codes"]) if packed else parts["codes"])[:, :cols]
        shape = (codes.shape[0], codes.shape[1])
        turned = PLAIN.pack(codes.t()) if packed else codes.t()
        return {"codes": turned, **self.rule.transpose(parts, self.block, shape)}

    def describe(self) -> dict[str, object]:
        # Bits of a 4096 x 4096 matrix, scales included.
        specs = self.parts(4096, 4096).values()
        bits = sum(8 * math.prod(s.shape) * s.dtype.itemsize for s in specs if s.dtype is not None)
        return {
            "name": self.name,
            "element": self.element.name,
            "block": self.block.name,
            "scale": f"{self.rule.name}, from a history" if self.is_delayed else self.rule.name,
            "transform": self.transform,
            "rounding": "stochastic" if self.is_stochastic else "nearest",
            "columnwise": "transposed" if self.is_derivable else "encoded",
            "bits_per_element": round(bits / 4096**2, 4),
        }

    def _scale(self, blocked: Blocked, scale: Tensor | None, amax: Tensor | None) -> Scaled:
        if scale is None and self.is_delayed:
            scale = torch.ones_like(blocked.amax)
        if scale is not None:
            return self.rule.from_scale(scale, blocked)
        if amax is not None and "amax" not in self.part_names:
            blocked = blocked._replace(amax=amax.to(torch.float32).reshape(blocked.amax.shape))
            amax = None
        return self.rule.from_amax(blocked, amax)

    def _values(
        self,
        parts: Parts,
        dtype: torch.dtype,
        scale_of: Callable[[Parts, tuple[int, int]], Tensor | None],
        stages: Stages,
    ) -> Tensor:
        codes, element, block = parts["codes"], self.element, self.stored_block
        if element.codes_per_byte == 2:
            codes = stages.unpack(codes)
        stored = block.view(codes).view(element.stored_dtype)
        scale = scale_of(parts, (stored.shape[0], stored.shape[2]))
        if scale is None:
            scale = torch.ones((1, 1, 1, 1), dtype=torch.float32, device=codes.device)
        values, (rows, cols) = stages.values(stored, scale, element, dtype), codes.shape
        return values.reshape(rows, cols) if values.numel() == rows * cols else block.unview(values, rows, cols)


@functools.cache
def _tiled(fmt: ScaledFormat, rows: int, cols: int) -> ScaledFormat:
    """One object for each format, since casts and decoders are remembered by it."""
    return replace(fmt, name=f"{fmt.name}_{rows}x{cols}", block=Block(rows, cols), is_delayed=False)


def check_values(name: str, scale: Tensor | None, amax: Tensor | None) -> None:
    """UserError for a scale that is not positive and finite, and for an amax that is NaN or negative.

    Values on a GPU are trusted, because to look at them would wait for the GPU.
    """
    cases: tuple[tuple[str, Tensor | None, str, Callable[[Tensor], Tensor]], ...] = (
        ("scale", scale, "positive and finite", lambda x: (x > 0) & torch.isfinite(x)),
        ("amax", amax, "at least 0", lambda x: x >= 0),
    )
    for what, values, least, allowed in cases:
        if values is not None and values.device.type == "cpu" and not torch.compiler.is_dynamo_compiling():
            wrong = values[~allowed(values)]
            if wrong.numel():
                raise UserError(f"{name} takes a {what} that is {least}; got {wrong[0].item():g}: correct it")


def check_sizes(fmt: ScaledFormat, parts: Parts) -> None:
    """UserError unless the scales fit the codes."""
    codes = parts["codes"]
    if codes.dim() != 2:
        raise UserError(f"{fmt.name} decodes codes of a matrix; got {codes.dim()}-D codes: pass all that encode gave")
    for name, spec in fmt.parts(codes.shape[0], codes.shape[1] * fmt.element.codes_per_byte).items():
        part, dtype = parts[name], spec.dtype
        if part.shape != spec.shape or (dtype is not None and part.dtype.itemsize != dtype.itemsize):
            raise UserError(
                f"{fmt.name} takes {name!r} of shape {tuple(spec.shape)} in {dtype} for codes of shape "
                f"{tuple(codes.shape)}; got {tuple(part.shape)} in {part.dtype}: pass all that encode gave"
            )


def check_request(
    fmt: ScaledFormat, x: Tensor, plane: str, scale: Tensor | None, amax: Tensor | None, seed: Tensor | int | None
) -> None:
    """UserError for a matrix that no scaled format encodes, and for arguments that this one does not take."""
    name = fmt.name
    is_matrix = (
        isinstance(x, Tensor) and x.dim() == 2 and (torch.compiler.is_dynamo_compiling() or x.layout is torch.strided)
    )
    if not is_matrix or x.is_nested or plane not in philox.PLANES:
        check_matrix(name, x, plane)
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise UserError(f"{name} encodes bf16, fp16 and fp32; got {x.dtype}: cast it first")
    if fmt.is_stochastic and seed is None:
        remedy = "pass seed=<64-bit integer>, or give a quantized parameter a format that rounds to nearest"
        raise UserError(f"{name} rounds stochastically and needs a seed; {remedy}")
    if scale is not None and amax is not None:
        raise UserError("scale and amax were both given; pass the one that decides")
    if scale is not None:
        if not fmt.rule.accepts_scale:
            raise UserError(f"{name} makes its own {fmt.rule.name} scales; omit scale=")
        _check_count(name, "scale", scale, fmt.parts(*x.shape)["scale"].shape)
    if amax is not None:
        if "amax" not in fmt.part_names and fmt.block not in (TENSOR, ROW):
            raise UserError(f"{name} takes the amax of each block itself; omit amax=")
        specs = fmt.parts(*x.shape)
        _check_count(name, "amax", amax, specs.get("amax", specs["scale"]).shape)


def _check_count(name: str, what: str, values: object, shape: tuple[int, ...]) -> None:
    if not isinstance(values, Tensor) or values.numel() != math.prod(shape):
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise UserError(f"{name} takes {what} as a tensor of shape {shape} for this input; got {got}")
