"""Planes of a weight kept between the microbatches of a step."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from duotone.tensor.context import QuantizeContext
from duotone.tensor.plane import Planes, Usage
from duotone.tensor.quantizer import Quantizer

Stamp = tuple[Quantizer, int, int, torch.dtype]


class WeightCache:
    """What one weight was encoded to, with the quantizer and the version of the weight that it was made of.

    Writes through `.data` leave no version: `clear`, or a first microbatch, makes the planes anew.
    """

    def __init__(self, weight: Callable[[], Tensor]) -> None:
        self.weight = weight
        self.stamp: Stamp | None = None
        self.planes = Planes(None, None)
        self.reused, self.refreshed = Reused(self), Refreshed(self)

    def clear(self) -> None:
        self.stamp, self.planes = None, Planes(None, None)

    def make(self, x: Tensor, quantizer: Quantizer, usage: Usage, ctx: QuantizeContext) -> Planes:
        with torch.inference_mode(False):  # an inference tensor could not be kept for a backward
            made = quantizer.encode(x, usage, ctx)
        owner = self.weight()
        if owner.is_inference() or x.is_inference():  # has no version, so that a write to it would go unseen
            self.clear()
        else:
            self.stamp, self.planes = (quantizer, id(owner), owner._version, x.dtype), made
        return made

    def take(self, x: Tensor, quantizer: Quantizer, usage: Usage, ctx: QuantizeContext) -> Planes:
        """The planes that are kept, or new ones where they are of another weight, version, format or direction."""
        owner, (row, col) = self.weight(), self.planes
        version = -1 if owner.is_inference() else owner._version
        if self.stamp != (quantizer, id(owner), version, x.dtype):
            return self.make(x, quantizer, usage, ctx)
        if (usage.rowwise and row is None) or (usage.columnwise and col is None):
            usage = Usage(usage.rowwise or row is not None, usage.columnwise or col is not None)
            return self.make(x, quantizer, usage, ctx)
        return Planes(row if usage.rowwise else None, col if usage.columnwise else None)


@dataclass(frozen=True, eq=False)
class Refreshed:
    """The operand of a first microbatch: encoded, and kept."""

    cache: WeightCache

    def planes(self, x: Tensor, quantizer: Quantizer, usage: Usage, ctx: QuantizeContext) -> Planes:
        return self.cache.make(x, quantizer, usage, ctx)


@dataclass(frozen=True, eq=False)
class Reused:
    """The operand of a later microbatch: what is kept, where it still stands for the weight."""

    cache: WeightCache

    def planes(self, x: Tensor, quantizer: Quantizer, usage: Usage, ctx: QuantizeContext) -> Planes:
        return self.cache.take(x, quantizer, usage, ctx)
