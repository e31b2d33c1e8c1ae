"""Op: what a module has to be to stand in a pipeline, and how a sequence of them is run."""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from duotone.errors import UserError
from duotone.pipeline.autograd import RUNNER, Backward, PipelineFunction
from duotone.pipeline.channels import Channels
from duotone.pipeline.deferred import DeferredOutput
from duotone.pipeline.rewrites import RULES, rewrite
from duotone.pipeline.second_order import is_transformed, second_order
from duotone.pipeline.slot_roles import KnownRoles
from duotone.pipeline.stage import Stage
from duotone.pipeline.tensor_info import TensorInfo, info_of, is_distributed, refuse_distributed
from duotone.state import frames
from duotone.state.amax_mode import AmaxMode, in_backward
from duotone.state.autocast_context import HIGH_PRECISION, AutocastRegion, active_region
from duotone.state.region import STACK
from duotone.state.rolling import roll_after
from duotone.state.stack import innermost

if TYPE_CHECKING:
    from duotone.pipeline.spread import Spread

KEEPS = "is_first_microbatch, fuse_wgrad_accumulation and delay_wgrad_compute keep tensors between calls"


class Op(Channels, KnownRoles):
    """Mixed in before an nn.Module. `link` is asked in order, before anything runs; a bad input is refused there."""

    takes_first_microbatch = True
    fuse_wgrad_accumulation = delay_wgrad_compute = False
    _rewritten: "Rewritten"

    @property
    def pipeline(self) -> "tuple[Op, ...] | None":
        """The ops that stand for this module in a larger pipeline; None if its forward does more than them."""
        return (self,) if type(self).forward is Op.forward else None

    def link(self, info: TensorInfo, is_first_microbatch: bool | None) -> tuple[Stage, TensorInfo, *tuple[object, ...]]:
        """The stage for an input like `info`, and what its output is like. Raises UserError where that cannot be.

        Further values are handed to `operands`: parameters that are fetched once for a call.
        """
        raise NotImplementedError

    def spread(self, x: "Spread") -> "Spread":
        """How the output lies on a mesh if the input lies there like `x`. UserError if the op takes local tensors."""
        refuse_distributed(getattr(self, "module_name", ""))

    def accept(self, stage: Stage, info: TensorInfo, extra: Sequence[object]) -> Sequence[object]:
        """The `extra` inputs of this call as the linked stage wants them. Raises UserError where one does not fit."""
        return extra

    def operands(
        self, stage: Stage, info: TensorInfo, extra: Sequence[object], *parameters: object
    ) -> Sequence[object]:
        """The operands of the linked stage: parameters, seeds and the accepted `extra` inputs of this call.

        Asked when every op is linked and nothing can be refused any more: only here may a seed advance.
        """
        return extra

    def __setstate__(self, state: dict[str, Any]) -> None:
        state.pop("_rewritten", None)  # older pickles may have it, in another form
        getattr(super(), "__setstate__", self.__dict__.update)(state)

    def _slow_forward(self, *inputs: object, **options: object) -> Any:
        """The forward that nn.Module takes while torch.jit.trace records, which quantized products cannot be."""
        region = active_region()
        recipe = region.recipe if region is not None else getattr(self, "recipe", HIGH_PRECISION)
        if recipe.evaluation is not None and not self.training:  # type: ignore[attr-defined]
            recipe = recipe.evaluation
        tensors = itertools.chain(inputs, self.parameters())  # type: ignore[attr-defined]
        tracked = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)
        if type(recipe) is not type(HIGH_PRECISION) or tracked:
            raise UserError(
                f"torch.jit.trace cannot record {type(self).__name__} under recipe {recipe.name}: trace within "
                "torch.no_grad() and duotone.autocast(enabled=False), or call duotone.revert(model) before"
            )
        return super()._slow_forward(*inputs, **options)  # type: ignore[misc]

    def forward(self, x: Tensor, *extra: object, is_first_microbatch: bool | None = None) -> Any:
        return run((self,), x, extra, is_first_microbatch, self)


def run(
    ops: Sequence[Op],
    x: Tensor,
    extra: Sequence[object],
    first: bool | None,
    owner: object,
    may_trace: bool = True,
    spread: "Spread | None" = None,
) -> Any:
    """Link the ops and run them as one pipeline. `owner` is the module that remembers rewritten tuples.

    What keeps weights or gradients from one call to the next runs outside of compiled graphs, without `may_trace`.
    So do DTensors. `spread` says how the DTensor lies on its mesh whose local tensor is `x`.
    """
    is_special = first is not None or (type(x) is not Tensor and (type(x) is DeferredOutput or is_distributed(x)))
    for op in ops:
        is_special = is_special or op.fuse_wgrad_accumulation or op.delay_wgrad_compute
    if is_special and (special := _special_run(x, may_trace)) is not None:
        return special(ops, x, extra, first, owner)
    info = info_of(x, owner, spread)
    x = x if info.dtype is x.dtype else x.to(info.dtype)
    taken, linked, stages = 0, [], ()
    for op in ops:
        before = info
        stage, info, *parameters = op.link(before, first)
        linked.append((op, stage, before, parameters))
        stages += (stage,)
        taken += op.extra_inputs
    if torch.compiler.is_dynamo_compiling():
        forward, backward, rolls, apply = stages, Backward(stages), False, PipelineFunction.apply
    else:
        forward, backward, rolls = _rewritten(stages, owner.__dict__)
        apply = RUNNER.apply
        if is_transformed():
            assert backward.again is not None
            backward.again.check()
            apply = backward.again.transformed
    accepted = _accepted(linked, extra, taken) if taken or extra else iter(())
    operands: list[object] = []
    for op, stage, before, parameters in linked:
        operands += op.operands(stage, before, next(accepted) if op.extra_inputs else (), *parameters)
    if info.device == "meta" or not torch.is_autocast_enabled(info.device):
        y = apply(forward, backward, x, *operands)
    else:  # operands are cast already: torch.autocast must not cast what is inside of products and epilogues
        with torch.autocast(info.device, enabled=False):
            y = apply(forward, backward, x, *operands)
    if backward.again is not None and backward.again.marks:
        y = y[0] if len(y) == 2 else y[:-1]
    if rolls and (output := y[0] if isinstance(y, tuple) else y).requires_grad:
        output.register_hook(roll_after)  # no gradient is delayed, so nothing else rolls the scales of forward
    return y


def _special_run(x: Tensor, may_trace: bool) -> Callable[..., Any] | None:
    """What runs a call whose tensors stay between calls, or whose input is deferred or may be a DTensor.

    None for `run` itself.
    """
    if type(x) is DeferredOutput:
        return x.reader.read
    if may_trace and (torch.compiler.is_dynamo_compiling() or "torch._dynamo" in sys.modules):
        from duotone.pipeline.uncompiled import run_uncompiled  # loads the compiler

        return run_uncompiled
    if not is_distributed(x):
        return None
    from duotone.pipeline.spread import run_spread  # loads DTensor

    return run_spread


def _accepted(
    linked: Sequence[tuple[Op, Stage, TensorInfo, Sequence[object]]], extra: Sequence[object], count: int
) -> Iterator[Sequence[object]]:
    """The further inputs of each op as its stage wants them. UserError unless there are `count` in all."""
    if count != len(extra):
        raise UserError(f"{len(extra)} further inputs were given to ops that take {count}; pass one for each")
    at, accepted = 0, []
    for op, stage, info, _ in linked:
        if op.extra_inputs:
            accepted.append(op.accept(stage, info, extra[at : at + op.extra_inputs]))
            at += op.extra_inputs
    return iter(accepted)


class CallRegion:
    """The region whose recipe the calls of one module follow."""

    def __init__(self) -> None:
        self.newest: tuple[AutocastRegion | None] | None = None
        """Where the newest forward ran that a backward may follow."""

    def now(self, mode: AmaxMode) -> AutocastRegion | None:
        """The region of this call: for a recompute that of its forward, which may have ended."""
        key = ("region", id(self))
        running = mode is AmaxMode.RECOMPUTE or (mode is not AmaxMode.RECORD and in_backward())
        record = frames.recomputed() if running else None
        if record is not None and record.holds(key):
            region: AutocastRegion | None = record.take(key)
        elif running and self.newest is not None:
            region = self.newest[0]
        else:
            regions = STACK.regions
            region = innermost(regions, "autocast") if regions else None
        frames.remember(key, region)
        if mode is not AmaxMode.USE and not running and (self.newest is None or self.newest[0] is not region):
            self.newest = (region,)
        return region


class Rewritten(dict[tuple[object, ...], tuple[tuple[Stage, ...], Backward, bool]]):
    """Rewritten forms by tuple of stages. They hold what belongs to this process: copies and pickles are empty."""

    def __reduce__(self) -> "tuple[type[Rewritten], tuple[()]]":
        return Rewritten, ()


REMEMBERED = 64
"""Tuples of stages that a module remembers the rewritten form of; plans that were forgotten leave some behind."""


def _rewritten(stages: tuple[Stage, ...], owner: dict[str, Any]) -> tuple[tuple[Stage, ...], Backward, bool]:
    """The stages of forward, the backward, and whether delayed scales of forward have nothing else to roll them."""
    cache: Rewritten = owner.setdefault("_rewritten", Rewritten())
    key = (RULES.version, *stages)
    entry = cache.get(key)
    if entry is None:
        if len(cache) >= REMEMBERED:
            cache.clear()
        forward, backward = rewrite(stages)
        again = second_order(stages, owner.get("module_name", ""))
        entry = cache[key] = forward, Backward(backward, again), any(stage.rolls_forward_alone for stage in stages)
    return entry
