"""Scale rules: from the amax of each block to the multiplier of encode and the factors that decode stores.

fl(.) in the formulas is one fp32 operation rounded to nearest even; every product and quotient here is one of its own.
Constants are divided as tensors: eager torch computes `constant / tensor` as a reciprocal times the constant, and CUDA
divides by a scalar through its reciprocal; both miss the IEEE quotient.

A rule answers the same questions for every format: which parts it stores, how it decides them, which factor of a stored
scale is exact inside a bf16 operand (`inner`) and which has to follow the product (`outer`).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from duotone.formats.elements import E4M3, Element
from duotone.formats.geometry import Block, crop
from duotone.formats.parts import Parts, PartSpec, Shard
from duotone.formats.stages import EXPONENT_MASK, Stages, divide, power_of_two

FLT_MAX = torch.finfo(torch.float32).max


class Blocked(NamedTuple):
    """One matrix on its way through encode: blocks, their amax (grid), and what fixes the codes."""

    blocks: Tensor
    amax: Tensor
    element: Element
    block: Block
    shape: tuple[int, int]
    dtype: torch.dtype
    stages: Stages
    shard: Shard | None = None
    propagate: bool = False
    """Whether a scale whose amax is infinite is stored as one that makes every product non-finite."""

    def agreed(self, amax: Tensor, spans: tuple[bool, bool]) -> Tensor:
        """`amax`, or its maximum over the shards where it spans the sharded dimension."""
        return amax if self.shard is None or not spans[self.shard.dim] else self.shard.max(amax)


class Scaled(NamedTuple):
    """A rule's decision: fp32 `multiplier` per block (grid), and the parts to store beside the codes."""

    multiplier: Tensor
    parts: Parts


@dataclass(frozen=True)
class Fp32Scale:
    """An fp32 scale MAX/amax, or the power of two below it; 1 where amax is 0 or not finite.

    `overflow` is the scale where MAX/amax overflows: "fp32" the largest fp32, "input" that of the input's dtype.
    An amax below `epsilon` counts as `epsilon`.
    """

    power_of_two: bool = False
    overflow: str = "fp32"
    epsilon: float = 0.0
    accepts_scale = True
    family = stored = "fp32"
    search = ""

    @property
    def name(self) -> str:
        floor = f", amax at least {self.epsilon:g}" if self.epsilon else ""
        return ("fp32 power of two" if self.power_of_two else "fp32") + floor

    @property
    def codec(self) -> str:
        return "power of two" if self.power_of_two else "fp32"

    def limits(self, element: Element, dtype: torch.dtype) -> tuple[float, float, float]:
        overflow = FLT_MAX if self.overflow == "fp32" else torch.finfo(dtype).max
        return element.max, overflow, self.epsilon

    def specs(self, block: Block, rows: int, cols: int) -> dict[str, PartSpec]:
        down, across = block.grid(rows, cols)
        shape = (1,) if block.name == "tensor" else (down, across)
        return {"scale": PartSpec(shape, torch.float32, block.rows or None, block.cols or None)}

    def decide(self, x: Blocked) -> Scaled:
        amax = x.agreed(x.amax, x.block.spans)
        scale, stored = x.stages.fp32_scale(amax, *self.limits(x.element, x.dtype), self.power_of_two)
        if x.propagate:
            stored = torch.where(torch.isinf(amax), torch.nan, stored)
        return Scaled(scale, {"scale": stored.reshape(self.specs(x.block, *x.shape)["scale"].shape)})

    def given(self, scale: Tensor, x: Blocked) -> Scaled:
        """The decision for an encode scale, which may come from outside (delayed scaling)."""
        scale = scale.to(torch.float32).reshape(x.amax.shape)
        if self.power_of_two:
            scale = (scale.view(torch.int32) & EXPONENT_MASK).view(torch.float32)
        spec = self.specs(x.block, *x.shape)["scale"]
        return Scaled(scale, {"scale": divide(1.0, scale).reshape(spec.shape)})

    def factor(self, parts: Parts, block: Block, shape: tuple[int, int]) -> Tensor:
        """fp32, broadcasts to (M, K): what a code's value is multiplied by."""
        return _spread(parts["scale"], block, shape)

    def inner(self, parts: Parts, block: Block, shape: tuple[int, int]) -> Tensor | None:
        return self.factor(parts, block, shape) if self.power_of_two else None

    def outer(self, parts: Parts) -> Tensor | None:
        return None if self.power_of_two else parts["scale"]

    def stored_block(self, block: Block) -> Block:
        """The block that one stored scale covers."""
        return block

    def outer_extent(self, block: Block) -> str:
        if self.power_of_two:
            return "none"
        return block.name if block.name in ("tensor", "row") else "block"

    @property
    def divisor(self) -> float:
        return 1.0

    def transpose(self, parts: Parts, block: Block, shape: tuple[int, int]) -> Parts:
        del block, shape
        scale = parts["scale"]
        return {"scale": scale.t() if scale.dim() == 2 else scale}


@dataclass(frozen=True)
class E8M0Scale:
    """A power of two as a biased exponent byte: amax/MAX rounded up, so that nothing saturates (the RCEIL mode)."""

    accepts_scale = False
    name = family = codec = "e8m0"
    search = ""
    divisor = 1.0

    def limits(self, element: Element, dtype: torch.dtype) -> tuple[float, float, float]:
        del dtype
        return element.reciprocal, 1.0, 0.0

    def specs(self, block: Block, rows: int, cols: int) -> dict[str, PartSpec]:
        return {"scale": PartSpec(block.grid(rows, cols), torch.uint8, block.rows, block.cols)}

    def decide(self, x: Blocked) -> Scaled:
        amax = torch.where(torch.isinf(x.amax), torch.nan, x.amax) if x.propagate else x.amax
        code, multiplier = x.stages.exponent_scale(amax, x.element.reciprocal)
        return Scaled(multiplier, {"scale": code})

    def factor(self, parts: Parts, block: Block, shape: tuple[int, int]) -> Tensor:
        return _spread(power_of_two(parts["scale"].to(torch.int32)), block, shape)

    def inner(self, parts: Parts, block: Block, shape: tuple[int, int]) -> Tensor | None:
        return self.factor(parts, block, shape)

    def outer(self, parts: Parts) -> Tensor | None:
        return None

    def stored_block(self, block: Block) -> Block:
        return block

    def outer_extent(self, block: Block) -> str:
        return "none"

    def transpose(self, parts: Parts, block: Block, shape: tuple[int, int]) -> Parts:
        del block, shape
        return {"scale": parts["scale"].t()}


@dataclass(frozen=True)
class TwoLevelScale:
    """NVFP4's scales: an E4M3 scale per block under S = MAX * block_max / g, with g the global amax.

    `block_max` is the E4M3 value that the scale of the largest block takes: 448, or 256 for 4-over-6. `per_row` keeps
    one g per row instead of one per tensor. The stored part `amax` is g; `scale` repeats over the rows of a 2-D block.
    """

    block_max: float = 448.0
    per_row: bool = False
    accepts_scale = False
    name = "e4m3 under an fp32 amax"
    family = codec = "two-level"
    search = ""

    @property
    def divisor(self) -> float:
        """MAX * block_max of E2M1: what a decoded product owes per operand."""
        return 6.0 * self.block_max

    def limits(self, element: Element, dtype: torch.dtype) -> tuple[float, float, float]:
        del dtype
        return element.max * self.block_max, FLT_MAX, 0.0

    def specs(self, block: Block, rows: int, cols: int) -> dict[str, PartSpec]:
        across = block.grid(rows, cols)[1]
        amax = PartSpec((rows,), torch.float32, 1) if self.per_row else PartSpec((1,), torch.float32, None)
        return {"scale": PartSpec((rows, across), torch.uint8, 1, block.cols), "amax": amax}

    def amax(self, x: Blocked) -> Tensor:
        """g from the amax of the blocks, of all shards: fp32 (1,) or (M,)."""
        if x.amax.numel() == 0:
            own = x.amax.new_zeros(self.specs(x.block, *x.shape)["amax"].shape)
        else:
            own = x.amax.amax(dim=1) if self.per_row else x.amax.amax().reshape(1)
        return x.agreed(own, (not self.per_row, True))

    def decide(self, x: Blocked, g: Tensor | None = None) -> Scaled:
        g = self.amax(x) if g is None else g.to(torch.float32, copy=True).reshape(-1)
        outer = self.global_scale(g, x.element)[:, None]
        return self.store(x.amax * (outer * x.element.reciprocal), outer, g, x)

    def global_scale(self, g: Tensor, element: Element) -> Tensor:
        scale = divide(element.max * self.block_max, g).clamp(max=FLT_MAX)
        return torch.where((g == 0) | (scale == 0), 1.0, scale)

    def store(self, block_scale: Tensor, outer: Tensor, g: Tensor, x: Blocked) -> Scaled:
        """Round the block scales to E4M3; the multiplier inverts what was stored."""
        code = E4M3.encode(block_scale.clamp(max=FLT_MAX))
        return Scaled(self.multiplier(code, outer), {"scale": self._rows(code, x), "amax": g})

    def multiplier(self, code: Tensor, outer: Tensor) -> Tensor:
        # A block scale that rounds to 0 gives FLT_MAX: its elements saturate, and decode to 0.
        return divide(1.0, E4M3.decode(code) * divide(1.0, outer)).clamp(max=FLT_MAX)

    def factor(self, parts: Parts, block: Block, shape: tuple[int, int]) -> Tensor:
        g = parts["amax"][:, None]
        constant = torch.full_like(g, 1.0 / self.divisor)
        return _spread((E4M3.decode(parts["scale"]) * g) * constant, self.stored_block(block), shape)

    def inner(self, parts: Parts, block: Block, shape: tuple[int, int]) -> Tensor | None:
        return _spread(E4M3.decode(parts["scale"]), self.stored_block(block), shape)

    def stored_block(self, block: Block) -> Block:
        return Block(1, block.cols)

    def outer(self, parts: Parts) -> Tensor | None:
        return parts["amax"]

    def outer_extent(self, block: Block) -> str:
        return "row" if self.per_row else "tensor"

    def transpose(self, parts: Parts, block: Block, shape: tuple[int, int]) -> Parts:
        scale = parts["scale"][:: block.rows].t().repeat_interleave(block.cols, 0)
        return {"scale": crop(scale, shape[1], scale.shape[1]), "amax": parts["amax"]}

    @staticmethod
    def _rows(code: Tensor, x: Blocked) -> Tensor:
        if x.block.rows == 1:
            return code
        return crop(code.repeat_interleave(x.block.rows, 0), x.shape[0], code.shape[1])


def _spread(factor: Tensor, block: Block, shape: tuple[int, int]) -> Tensor:
    """A factor per block -> blocked (grid rows, 1, grid cols, 1), which broadcasts to the blocked codes."""
    down, across = block.grid(*shape)
    return factor.reshape(down, 1, across, 1) if factor.numel() != 1 else factor.reshape(1, 1, 1, 1)
