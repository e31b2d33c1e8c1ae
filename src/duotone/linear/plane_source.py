"""Where the planes of an operand come from: encoded now, held by a tensor or a cache, or values in high precision.

The plan names the source; execution calls `planes`.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook

from duotone.capture import is_capturing
from duotone.errors import UserError
from duotone.formats import IDENTITY
from duotone.graph_ops import cast_after
from duotone.tensor import QuantizedTensor
from duotone.tensor.context import QuantizeContext
from duotone.tensor.gathers import ROWWISE
from duotone.tensor.plane import Plane, Planes, Usage, location_of
from duotone.tensor.quantizer import Quantizer


@dataclass(frozen=True, eq=False)
class PlaneSource:
    """How a tensor becomes planes."""

    name: str
    planes: Callable[[Tensor, Quantizer, Usage, QuantizeContext], Planes] = field(repr=False)
    """The planes of a matrix that a usage names."""

    encodes: bool = False
    """Whether the quantizer encodes the planes from a plain tensor, now or earlier."""


def _values(x: Tensor, quantizer: Quantizer, usage: Usage, ctx: QuantizeContext) -> Planes:
    """The planes of the Identity quantizer, in less host time."""
    rowwise, columnwise = usage
    row = Plane(IDENTITY, {"codes": x}, (x.shape[0], x.shape[1])) if rowwise else None
    return Planes(row, Plane(IDENTITY, {"codes": x.t()}, (x.shape[1], x.shape[0])) if columnwise else None)


def _planes_of(x: Tensor, quantizer: Quantizer, usage: Usage, ctx: QuantizeContext) -> Planes:
    """A plane that the tensor lacks is derived if that is lossless, and stays with the tensor."""
    assert isinstance(x, QuantizedTensor)
    row, col = x.planes
    if x.gathers is not None:
        row, col = x.gathers.readable(x.planes, ROWWISE)
        x.gathers.record(ctx.slots, usage)
    if (usage.rowwise and row is None) or (usage.columnwise and col is None):
        with torch.inference_mode(False):  # an inference tensor could not be written in training
            x.update_usage(usage.rowwise or None, usage.columnwise or None)
        row, col = x.planes
    if ctx.nominal is not None and ctx.nominal is not x.dtype and row is not None and row.format == IDENTITY:
        row = Plane(IDENTITY, {"codes": row.parts["codes"].to(ctx.nominal)}, row.shape)  # as torch.autocast does
    return Planes(row if usage.rowwise else None, col if usage.columnwise else None)


def in_dtype_of(plane: Plane, dy: Tensor) -> Plane:
    """The columnwise plane of a weight in high precision, in the dtype of the gradient `dy` that it multiplies.

    Forward may not have its memory yet: FSDP2 gathers it for backward. So a graph casts after `dy` exists.
    """
    codes = plane.parts["codes"]
    if codes.dtype is dy.dtype:
        return plane
    return Plane(IDENTITY, {"codes": cast_after(codes, dy)}, plane.shape)


def _dequantized(x: Tensor, quantizer: Quantizer, usage: Usage, ctx: QuantizeContext) -> Planes:
    assert isinstance(x, QuantizedTensor)
    return quantizer.encode(x.values(ctx.nominal or x.dtype), usage, ctx)


ENCODE_NOW = PlaneSource("now", lambda x, quantizer, usage, ctx: quantizer.encode(x, usage, ctx), encodes=True)
"""A plain tensor, which `OperandPlan.encode` passes to the quantizer itself."""
HIGH_PRECISION = PlaneSource("high precision", _values)
"""A plain tensor that stays in high precision."""
USE_HELD = PlaneSource("held", _planes_of)
"""The planes of a quantized tensor."""
DEQUANTIZE_HELD = PlaneSource("held, dequantized", _dequantized)
"""The values of a quantized tensor in a plan that computes in high precision."""

IN_HIGH_PRECISION = Quantizer()


def source_of_plain(quantizer: Quantizer) -> PlaneSource:
    """Where the planes of a plain tensor come from."""
    return HIGH_PRECISION if type(quantizer) is Quantizer and quantizer == IN_HIGH_PRECISION else ENCODE_NOW


Stamp = tuple[Quantizer, torch.dtype, torch.device, torch.Size, object, tuple[tuple[object, ...], ...]]


class OptimizerSteps:
    """Marks the steps of all optimizers of the process, from the first weight cache on.

    Fused optimizers write weights without a new version, so a cache compares `last` too. It is a new object for each
    step, and not a count: a compiled step has a guard on each number that it reads, and would compile again.
    """

    def __init__(self) -> None:
        self.last, self.is_registered = object(), False

    def register(self) -> None:
        """Start to mark steps, unless it was started before."""
        if not self.is_registered:
            self.is_registered = True
            register_optimizer_step_post_hook(self)

    def __call__(self, *_: object) -> None:
        self.last = object()


STEPS = OptimizerSteps()


class WeightCache:
    """The planes of one weight, with their quantizer and the versions and memory of the parameters behind the weight.

    In-place writes through `.data` leave no version. After such a write, call `clear`, or begin with a first
    microbatch.
    """

    def __init__(self, owners: Callable[[], Sequence[Tensor]]) -> None:
        self.owners = owners
        self.stamp: Stamp | None = None
        """The stamp of the weight in the planes."""
        self.last_stamp: Stamp | None = None
        """The stamp of the weight in the last call, which may be captured and not run."""
        self.planes = Planes(None, None)
        self.captured: Planes | None = None
        """The planes that graphs read. They must stay in memory."""
        self.reused = PlaneSource("cache", self.reuse, True)
        self.refreshed = PlaneSource("to cache", self.refresh, True)
        STEPS.register()

    def clear(self) -> None:
        """Forget the planes."""
        self.stamp, self.planes, self.captured = None, Planes(None, None), None

    def refresh(self, x: Tensor, quantizer: Quantizer, usage: Usage, ctx: QuantizeContext) -> Planes:
        """Encode the weight and remember the planes."""
        # Remembered planes have no graph and are no inference tensors. Outside of inference mode,
        # inference_mode(False) would hide that the forward of an autograd.Function runs.
        infers = torch.is_inference_mode_enabled()
        with torch.inference_mode(False) if infers else nullcontext(), torch.no_grad():
            planes = quantizer.encode(x, usage, ctx)
        self.stamp = self.last_stamp = self._stamp_of(x, quantizer)
        self.planes = Planes(None, None) if self.stamp is None else planes
        return planes

    def reuse(self, x: Tensor, quantizer: Quantizer, usage: Usage, ctx: QuantizeContext) -> Planes:
        """The remembered planes; new ones if they are of another weight, version, format or direction."""
        row, col = self.planes
        if self.stamp is None or self.stamp != self._stamp_of(x, quantizer):
            return self.refresh(x, quantizer, usage, ctx)
        follows = quantizer.columnwise_source == "original" and row is not None and quantizer.columnwise == row.format
        if usage.columnwise and col is None and row is not None and follows:
            col = row.transposed()  # with its present scale, because a recompute could not ask for a new one
            self.planes = Planes(row, col)
        if (usage.rowwise and row is None) or (usage.columnwise and col is None):
            both = Usage(usage.rowwise or row is not None, usage.columnwise or col is not None)
            return self.refresh(x, quantizer, both, ctx)
        return Planes(row if usage.rowwise else None, col if usage.columnwise else None)

    def flagged(self, flag: Callable[[], Tensor | None]) -> PlaneSource:
        """The source of a microbatch that is a first one if the call's flag, one element on the device, is not 0."""

        def planes(x: Tensor, quantizer: Quantizer, usage: Usage, ctx: QuantizeContext) -> Planes:
            is_first = flag()
            assert is_first is not None
            return self.rewrite(x, quantizer, usage, ctx, is_first)

        return PlaneSource("flagged cache", planes, True)

    def rewrite(self, x: Tensor, quantizer: Quantizer, usage: Usage, ctx: QuantizeContext, flag: Tensor) -> Planes:
        """The remembered planes, encoded anew in their memory if `flag` is not 0 on the device, or the weight changed.

        The memory stays, because graphs read it, until the quantizer, dtype, device, shape or direction changes.
        UserError if a graph captures then.
        """
        row, col = self.planes
        capturing = is_capturing()
        if self.stamp is None or self.stamp[:4] != (quantizer, x.dtype, x.device, x.shape):
            row = col = None  # these planes cannot be written over
        if (usage.rowwise and row is None) or (usage.columnwise and col is None):
            if capturing:
                raise UserError("is_first_microbatch is a tensor: run this call once, then capture, so planes exist")
            both = Usage(usage.rowwise or row is not None, usage.columnwise or col is not None)
            return self.refresh(x, quantizer, both, ctx)
        noop, stamp = flag == 0, self._stamp_of(x, quantizer)
        if capturing:
            if self.captured is not None and self.captured is not self.planes:
                raise UserError("an earlier graph has other planes: call invalidate_weight_cache, then capture all")
            self.captured = self.planes
        elif stamp is None:
            return self.refresh(x, quantizer, usage, ctx)
        elif stamp != self.stamp:
            noop = torch.zeros_like(noop)
        buffers = self.planes.buffers
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(buffers):  # type: ignore[attr-defined]
            planes = QuantizedTensor(self.planes, quantizer, x.shape, x.dtype, device=x.device)
            planes.quantize_(x, noop_flag=noop, ctx=ctx)  # all planes, because the stamp is of all
        if stamp != self.last_stamp:  # forwards of another weight can have no backward from now on
            increment_version(buffers)
        self.last_stamp = stamp
        if not capturing:
            self.stamp = stamp
        return Planes(row if usage.rowwise else None, col if usage.columnwise else None)

    def _stamp_of(self, x: Tensor, quantizer: Quantizer) -> Stamp | None:
        """None for inference tensors: they have no version, so nobody would see a write."""
        owners = self.owners()
        if any(owner.is_inference() for owner in owners):
            return None
        versions = tuple(
            (id(owner), owner._version, getattr(owner, "version_of_shard", 0), *location_of(owner)) for owner in owners
        )
        return quantizer, x.dtype, x.device, x.shape, STEPS.last, versions
