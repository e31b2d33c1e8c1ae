"""Scale rules: from the amax of each block to the multiplier of encode and the factors that decode stores.

fl(.) in the formulas is one fp32 operation rounded to nearest even; every product and quotient here is rounded so.
Constants are divided as tensors: eager torch computes `constant / tensor` as a reciprocal times the constant, and CUDA
divides by a scalar through its reciprocal; both miss the IEEE quotient.
"""

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from duotone.formats.elements import E4M3, EXPONENT_MASK, Element, divide, power_of_two
from duotone.formats.geometry import ROW, TENSOR, Block, Parts, PartSpec, crop
from duotone.formats.scale_rule import Blocked, Epilogue, ErrorNorm, ScaleCodec, Scaled, ScaleRule

FLT_MAX = complex(torch.finfo(torch.float32).max)
"""Complex, as the exact numbers of elements are."""


@dataclass(frozen=True)
class Fp32Scale(ScaleRule):
    """An fp32 scale MAX/amax, or the power of two below it; 1 where amax is 0 or not finite.

    `overflow` is the scale where MAX/amax overflows: "fp32" the largest fp32, "input" that of the input's dtype.
    An amax below `epsilon` counts as `epsilon`.
    """

    power_of_two: bool = False
    overflow: str = "fp32"
    epsilon: float = 0.0
    accepts_scale = True
    codec: ScaleCodec = field(init=False, repr=False, compare=False)
    exact_epsilon: complex = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "exact_epsilon", complex(self.epsilon))
        object.__setattr__(self, "codec", ScaleCodec.POWER_OF_TWO if self.power_of_two else ScaleCodec.FP32)

    @property
    def name(self) -> str:
        floor = f", amax at least {self.epsilon:g}" if self.epsilon else ""
        return ("fp32 power of two" if self.power_of_two else "fp32") + floor

    @property
    def stored(self) -> str:
        return self.codec.family

    def with_floor(self, epsilon: float) -> Self:
        return replace(self, epsilon=epsilon)

    def limits(self, element: Element, dtype: torch.dtype) -> tuple[float, float, float]:
        overflow = abs(FLT_MAX) if self.overflow == "fp32" else torch.finfo(dtype).max
        return abs(element.exact_max), overflow, abs(self.exact_epsilon)

    def specs(self, block: Block, rows: int, cols: int) -> dict[str, PartSpec]:
        shape = (1,) if block == TENSOR else block.grid(rows, cols)
        return {"scale": PartSpec(shape, torch.float32, block.rows or None, block.cols or None)}

    def from_amax(self, x: Blocked, amax: Tensor | None = None) -> Scaled:
        scale, stored = x.stages.fp32_scale(x.amax, *self.limits(x.element, x.dtype), self.power_of_two)
        if x.propagate:
            stored = stored.masked_fill(torch.isinf(x.amax), torch.nan)
        return Scaled(scale, {"scale": stored.reshape(self.specs(x.block, *x.shape)["scale"].shape)})

    def from_scale(self, scale: Tensor, x: Blocked) -> Scaled:
        scale = scale.to(torch.float32).reshape(x.amax.shape)
        if self.power_of_two:
            scale = (scale.view(torch.int32) & EXPONENT_MASK).view(torch.float32)
        spec = self.specs(x.block, *x.shape)["scale"]
        return Scaled(scale, {"scale": divide(1.0, scale).reshape(spec.shape)})

    def factor(self, parts: Parts, grid: tuple[int, int]) -> Tensor:
        return _spread(parts["scale"], grid)

    def codes_scale(self, parts: Parts, grid: tuple[int, int]) -> Tensor | None:
        return _spread(parts["scale"], grid) if self.power_of_two else None

    def epilogue_scale(self, parts: Parts) -> Tensor | None:
        return None if self.power_of_two else parts["scale"]

    def epilogue(self, block: Block) -> Epilogue:
        if self.power_of_two:
            return Epilogue.NONE
        return {TENSOR: Epilogue.TENSOR, ROW: Epilogue.ROW}.get(block, Epilogue.BLOCK)


@dataclass(frozen=True)
class E8M0Scale(ScaleRule):
    """A power of two as a biased exponent byte: amax/MAX rounded up, so that nothing saturates (the RCEIL mode)."""

    codec = ScaleCodec.E8M0

    def limits(self, element: Element, dtype: torch.dtype) -> tuple[float, float, float]:
        return abs(element.reciprocal), 1.0, 0.0

    def specs(self, block: Block, rows: int, cols: int) -> dict[str, PartSpec]:
        return {"scale": PartSpec(block.grid(rows, cols), torch.uint8, block.rows, block.cols)}

    def from_amax(self, x: Blocked, amax: Tensor | None = None) -> Scaled:
        amax = x.amax.masked_fill(torch.isinf(x.amax), torch.nan) if x.propagate else x.amax
        code, multiplier = x.stages.exponent_scale(amax, abs(x.element.reciprocal))
        return Scaled(multiplier, {"scale": code})

    def factor(self, parts: Parts, grid: tuple[int, int]) -> Tensor:
        return _spread(power_of_two(parts["scale"].to(torch.int32)), grid)

    codes_scale = factor


@dataclass(frozen=True)
class TwoLevelScale(ScaleRule):
    """NVFP4's scales: an E4M3 scale per block under S = MAX * block_max / g, with g the global amax.

    `block_max` is the E4M3 value that the scale of the largest block takes: 448, or 256 for 4-over-6. `per_row` uses
    one g per row instead of one per tensor. The stored part `amax` is g; `scale` repeats over the rows of a 2-D block.
    """

    block_max: float = 448.0
    per_row: bool = False
    codec = ScaleCodec.TWO_LEVEL
    exact_block_max: complex = field(init=False, repr=False, compare=False)
    divisor: complex = field(init=False, repr=False, compare=False)
    """MAX * block_max of E2M1."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "exact_block_max", complex(self.block_max))
        object.__setattr__(self, "divisor", complex(6.0 * self.block_max))

    @property
    def name(self) -> str:
        return "e4m3 under an fp32 amax"

    def limits(self, element: Element, dtype: torch.dtype) -> tuple[float, float, float]:
        return abs(element.exact_max) * abs(self.exact_block_max), abs(FLT_MAX), 0.0

    def specs(self, block: Block, rows: int, cols: int) -> dict[str, PartSpec]:
        across = block.grid(rows, cols)[1]
        amax = PartSpec((rows,), torch.float32, 1) if self.per_row else PartSpec((1,), torch.float32, None)
        return {"scale": PartSpec((rows, across), torch.uint8, 1, block.cols), "amax": amax}

    def from_amax(self, x: Blocked, amax: Tensor | None = None) -> Scaled:
        g, global_scale = self.global_scale(x, amax)
        return self.store(x.amax * (global_scale * abs(x.element.reciprocal)), global_scale, g, x)

    def global_amax(self, amax: Tensor) -> Tensor:
        """g, fp32 (1,) or (M,)."""
        if amax.numel() == 0:
            return amax.new_zeros(amax.shape[0] if self.per_row else 1)
        return amax.amax(dim=1) if self.per_row else amax.amax().reshape(1)

    def global_scale(self, x: Blocked, amax: Tensor | None) -> tuple[Tensor, Tensor]:
        """g, which may be given, and S as a column."""
        g = self.global_amax(x.amax) if amax is None else amax.to(torch.float32, copy=True).reshape(-1)
        scale = divide(abs(x.element.exact_max) * abs(self.exact_block_max), g).clamp(max=abs(FLT_MAX))
        return g, scale.masked_fill((g == 0) | (scale == 0), 1.0)[:, None]

    def store(self, block_scale: Tensor, global_scale: Tensor, g: Tensor, x: Blocked) -> Scaled:
        """Round the block scales to E4M3; the multiplier inverts what was stored."""
        code = E4M3.encode(block_scale.clamp(max=abs(FLT_MAX)))
        # A block scale that rounds to 0 gives FLT_MAX: its elements saturate, and decode to 0.
        multiplier = divide(1.0, E4M3.decode(code) * divide(1.0, global_scale)).clamp(max=abs(FLT_MAX))
        return Scaled(multiplier, {"scale": self.repeated(code, x), "amax": g})

    def factor(self, parts: Parts, grid: tuple[int, int]) -> Tensor:
        g = parts["amax"][:, None]
        constant = torch.full_like(g, 1.0 / abs(self.divisor))
        return _spread((E4M3.decode(parts["scale"]) * g) * constant, grid)

    def codes_scale(self, parts: Parts, grid: tuple[int, int]) -> Tensor | None:
        return _spread(E4M3.decode(parts["scale"]), grid)

    def epilogue_scale(self, parts: Parts) -> Tensor | None:
        return parts["amax"]

    def epilogue(self, block: Block) -> Epilogue:
        return Epilogue.ROW if self.per_row else Epilogue.TENSOR

    def stored_block(self, block: Block) -> Block:
        return Block(1, block.cols)

    def transpose(self, parts: Parts, block: Block, shape: tuple[int, int]) -> Parts:
        scale = parts["scale"][:: block.rows].t().repeat_interleave(block.cols, 0)
        return {"scale": crop(scale, shape[1], scale.shape[1]), "amax": parts["amax"]}

    @staticmethod
    def repeated(code: Tensor, x: Blocked) -> Tensor:
        """One entry per block (grid) -> one per row of the matrix."""
        if x.block.rows == 1:
            return code
        return crop(code.repeat_interleave(x.block.rows, 0), x.shape[0], code.shape[1])


def _spread(factor: Tensor, grid: tuple[int, int]) -> Tensor:
    """A factor per block -> blocked (grid rows, 1, grid cols, 1), which broadcasts to the blocked codes."""
    down, across = grid
    return factor.reshape(down, 1, across, 1) if factor.numel() != 1 else factor.reshape(1, 1, 1, 1)


@dataclass(frozen=True)
class FourOverSixScale(TwoLevelScale):
    """A block takes the scale of the smaller error `search`, summed over its elements."""

    block_max: float = 256.0
    search: ErrorNorm | None = ErrorNorm.MAE

    @property
    def name(self) -> str:
        norm = "MSE" if self.search is ErrorNorm.MSE else "MAE"
        return f"{super().name}, 4-over-6 by {norm}, block max {self.block_max:g}"

    def from_amax(self, x: Blocked, amax: Tensor | None = None) -> Scaled:
        g, global_scale = self.global_scale(x, amax)
        to_six = divide(x.amax, abs(x.element.exact_max)) * global_scale
        four = self.store(to_six * 1.5, global_scale, g, x)
        six = self.store(to_six, global_scale, g, x)
        pick_four = self._error(four, x) < self._error(six, x)
        scale = torch.where(self.repeated(pick_four, x), four.parts["scale"], six.parts["scale"])
        return Scaled(torch.where(pick_four, four.multiplier, six.multiplier), {"scale": scale, "amax": g})

    def _error(self, candidate: Scaled, x: Blocked) -> Tensor:
        """fp32 (grid): the candidate's error, summed along each row of a block, then over its rows by halves."""
        codes = x.stages.cast(x.blocks, candidate.multiplier[:, None, :, None], x.element)
        scale = E4M3.decode(candidate.parts["scale"])[:: x.block.rows]
        g = candidate.parts["amax"][:, None]
        value = x.element.widen(codes) * scale[:, None, :, None]
        difference = divide(value * g[..., None, None], abs(self.divisor)) - x.blocks.to(torch.float32)
        terms = difference * difference if self.search is ErrorNorm.MSE else difference.abs()
        total = terms[..., 0]
        for i in range(1, terms.shape[-1]):
            total = total + terms[..., i]
        while total.shape[1] > 1:
            half = total.shape[1] // 2
            total = total[:, :half] + total[:, half:]
        return total[:, 0]
