"""Planes of a weight kept between the microbatches of a step."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from duotone.tensor.context import QuantizeContext
from duotone.tensor.plane import Planes, Usage
from duotone.tensor.quantizer import Quantizer

Stamp = tuple[Quantizer, torch.dtype, torch.device, int, tuple[tuple[int, int], ...]]


class OptimizerSteps:
    """Counts the steps of all optimizers of the process, from the first weight cache on.

    Fused optimizers write weights without a new version, so a cache compares the count too.
    """

    def __init__(self) -> None:
        self.count = 0
        self.is_registered = False

    def register(self) -> None:
        if not self.is_registered:
            self.is_registered = True
            register_optimizer_step_post_hook(self)

    def __call__(self, *_: object) -> None:
        self.count += 1


STEPS = OptimizerSteps()


class WeightCache:
    """What one weight was encoded to, with the quantizer and the versions of the parameters that it was made of.

    Writes through `.data` leave no version: `clear`, or a first microbatch, makes the planes anew.
    """

    def __init__(self, owners: Callable[[], Sequence[Tensor]]) -> None:
        self.owners = owners
        self.stamp: Stamp | None = None
        self.planes = Planes(None, None)
        self.reused, self.refreshed = Reused(self), Refreshed(self)
        STEPS.register()

    def clear(self) -> None:
        self.stamp, self.planes = None, Planes(None, None)

    def make(self, x: Tensor, quantizer: Quantizer, usage: Usage, ctx: QuantizeContext) -> Planes:
        # What is kept is no inference tensor and has no graph. Elsewhere inference_mode(False) would turn on what tells
        # the forward of an autograd.Function from others.
        infers = torch.is_inference_mode_enabled()
        with torch.inference_mode(False) if infers else nullcontext(), torch.no_grad():
            made = quantizer.encode(x, usage, ctx)
        stamp = self._stamp_of(x, quantizer)
        self.stamp, self.planes = stamp, made if stamp is not None else Planes(None, None)
        return made

    def _stamp_of(self, x: Tensor, quantizer: Quantizer) -> Stamp | None:
        """None where a write would go unseen, because inference tensors have no version."""
        owners = self.owners()
        if any(owner.is_inference() for owner in owners):
            return None
        return quantizer, x.dtype, x.device, STEPS.count, tuple((id(owner), owner._version) for owner in owners)

    def take(self, x: Tensor, quantizer: Quantizer, usage: Usage, ctx: QuantizeContext) -> Planes:
        """The planes that are kept, or new ones where they are of another weight, version, format or direction."""
        row, col = self.planes
        if self.stamp is None or self.stamp != self._stamp_of(x, quantizer):
            return self.make(x, quantizer, usage, ctx)
        follows = quantizer.columnwise_source == "original" and row is not None and quantizer.columnwise == row.format
        if usage.columnwise and col is None and row is not None and follows:
            col = row.transposed()  # without a scale anew, which a recompute could not ask for
            self.planes = Planes(row, col)
        if (usage.rowwise and row is None) or (usage.columnwise and col is None):
            usage = Usage(usage.rowwise or row is not None, usage.columnwise or col is not None)
            return self.make(x, quantizer, usage, ctx)
        return Planes(row if usage.rowwise else None, col if usage.columnwise else None)


@dataclass(frozen=True, eq=False)
class Refreshed:
    """The operand of a first microbatch: encoded, and kept."""

    cache: WeightCache
    encodes: ClassVar[bool] = True

    def planes(self, x: Tensor, quantizer: Quantizer, usage: Usage, ctx: QuantizeContext) -> Planes:
        return self.cache.make(x, quantizer, usage, ctx)


@dataclass(frozen=True, eq=False)
class Reused:
    """The operand of a later microbatch: what is kept, where it still stands for the weight."""

    cache: WeightCache
    encodes: ClassVar[bool] = True

    def planes(self, x: Tensor, quantizer: Quantizer, usage: Usage, ctx: QuantizeContext) -> Planes:
        return self.cache.take(x, quantizer, usage, ctx)
