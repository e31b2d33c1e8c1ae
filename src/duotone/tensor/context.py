"""QuantizeContext: what a quantize needs besides the tensor, passed at the point of use and kept by no quantizer."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from duotone.comm import ShardContext


class Slot(Protocol):
    """One place of delayed scaling: its scale, and where the amax goes."""

    def scale_for(self, x: Tensor) -> Tensor:
        """The scale to encode `x` with, fp32 (1,); records the amax of `x`."""
        ...


@dataclass(frozen=True)
class QuantizeContext:
    """`shard`: the tensor is one shard of another. `slots`: delayed scaling of the rowwise and the columnwise plane.

    `seed`: int64 (1,), for stochastic rounding.
    """

    shard: ShardContext | None = None
    slots: tuple[Slot | None, Slot | None] = (None, None)
    seed: Tensor | None = None

    def with_seed(self, seed: Tensor | None) -> "QuantizeContext":
        return self if seed is None else QuantizeContext(self.shard, self.slots, seed)


LOCAL = QuantizeContext()
"""A whole tensor on one device, rounded to nearest, scaled by itself."""
