"""The interface of scale rules: which parts a rule stores, how it decides them, and how a product applies them."""

from collections.abc import Hashable
from enum import Enum
from typing import NamedTuple, Self

import torch
from torch import Tensor

from duotone.formats.elements import Element, Stages
from duotone.formats.geometry import Block, Parts, PartSpec


class ScaleCodec(Enum):
    """How scales are stored."""

    NONE = "no"
    FP32 = "fp32"
    POWER_OF_TWO = "power of two"
    """fp32 with an empty mantissa."""
    E8M0 = "e8m0"
    TWO_LEVEL = "two-level"
    """E4M3 under an fp32 amax."""

    @property
    def family(self) -> str:
        """What two operands of one tensor core instruction share."""
        return ScaleCodec.FP32.value if self is ScaleCodec.POWER_OF_TWO else self.value


class Epilogue(Enum):
    """Which scale follows the product of decoded codes, because bf16 codes cannot contain it exactly."""

    NONE = "none"
    TENSOR = "one per tensor"
    ROW = "one per row"
    BLOCK = "one per block along the contraction"
    HIGH_PRECISION = "none, and the operand is not exact in bf16"


class ErrorNorm(Enum):
    """The error by which a block chooses between two scales."""

    MAE = "mae"
    MSE = "mse"


class Blocked(NamedTuple):
    """One matrix during an encode: its blocks, their amax (grid), and the arguments that decide the codes."""

    blocks: Tensor
    amax: Tensor
    element: Element
    block: Block
    shape: tuple[int, int]
    dtype: torch.dtype
    stages: Stages
    propagate: bool = False
    """Whether a scale whose amax is infinite is stored as one that makes every product non-finite."""


class Scaled(NamedTuple):
    """A rule's decision: fp32 `multiplier` per block (grid), and the parts to store beside the codes."""

    multiplier: Tensor
    parts: Parts


class ScaleRule:
    """How a format computes, stores and reads its scales. The defaults serve one part "scale", applied in decode.

    A decoded code is multiplied by `factor`, which has two parts. `codes_scale` is exact in a bf16 operand of a GEMM.
    `epilogue_scale` over `divisor` follows the product.
    """

    codec: ScaleCodec
    search: ErrorNorm | None = None
    """The error by which a block chooses between two scales. None: its amax decides."""
    accepts_scale: bool = False
    """Whether an encode scale may come from outside (delayed scaling)."""
    divisor: complex = 1 + 0j
    """The divisor of a product for each operand: the real part, complex like the exact numbers of elements."""

    @property
    def name(self) -> str:
        """The fields for `Format.describe`."""
        return self.codec.value

    @property
    def stored(self) -> Hashable:
        """What decides how stored scales are read."""
        return self

    def with_floor(self, epsilon: float) -> Self | None:
        """The rule in which an amax counts as at least `epsilon`. None if it knows no such floor."""
        return None

    def limits(self, element: Element, dtype: torch.dtype) -> tuple[float, float, float]:
        """See `Format.scale_limits`."""
        raise NotImplementedError

    def specs(self, block: Block, rows: int, cols: int) -> dict[str, PartSpec]:
        """The parts beside the codes."""
        raise NotImplementedError

    def global_amax(self, amax: Tensor) -> Tensor:
        """What the scales of several blocks follow from, from the amax of each block (grid)."""
        return amax

    def from_amax(self, x: Blocked, amax: Tensor | None = None) -> Scaled:
        """The decision for the amax of the blocks; `amax` is that of the matrix or of its rows, from outside."""
        raise NotImplementedError

    def from_scale(self, scale: Tensor, x: Blocked) -> Scaled:
        """The decision for an encode scale from outside."""
        raise NotImplementedError

    def factor(self, parts: Parts, grid: tuple[int, int]) -> Tensor:
        """fp32, broadcasts to the blocked codes. `grid` is how many stored blocks they have down and across."""
        raise NotImplementedError

    def codes_scale(self, parts: Parts, grid: tuple[int, int]) -> Tensor | None:
        """fp32 factor of the codes before a product. None without a factor."""
        return self.factor(parts, grid)

    def epilogue_scale(self, parts: Parts) -> Tensor | None:
        """fp32 factor of the result of a product. None without a factor."""
        return None

    def epilogue(self, block: Block) -> Epilogue:
        """The shape of `epilogue_scale` for blocks of this size."""
        return Epilogue.NONE

    def stored_block(self, block: Block) -> Block:
        """The block that one stored scale covers."""
        return block

    def transpose(self, parts: Parts, block: Block, shape: tuple[int, int]) -> Parts:
        """The scales of the transpose, without loss."""
        scale = parts["scale"]
        return {"scale": scale.t() if scale.dim() == 2 else scale}
