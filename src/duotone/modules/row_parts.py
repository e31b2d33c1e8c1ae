"""What the names of linears and groups in rows stand for: their shapes, and how an op finds the stage of one module."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from duotone.linear.core import LinearStage
from duotone.linear.operand_plan import REENCODE_IN_GRAPH
from duotone.linear.plane_source import USE_HELD
from duotone.linear.sink import GRADIENT
from duotone.modules.base import Call, PlannedModule, PlannedStage, Plans
from duotone.modules.parametrizations import reads_without_effect
from duotone.modules.traced_stages import number_of, owner_of
from duotone.modules.weights import records_amaxes
from duotone.pipeline.row_call import KEEPING
from duotone.pipeline.rows import PARTS, Held, Part, Rows
from duotone.pipeline.stage import Saved, Stage
from duotone.tensor.context import Slot


class ShapeSlot(Slot):
    """A slot of a stage that only tells shapes."""

    def scale_for(self, x: Tensor) -> Tensor:
        return x.new_empty(1, dtype=torch.float32)

    scale_now = scale_for


@dataclass(frozen=True, eq=False)
class ShapesOfGroup(Stage):
    """A group that only tells the shape of its output. `arity` is that of the group."""

    arity: tuple[int, ...]  # type: ignore[misc]

    def forward(self, x: Tensor, *operands: Any) -> tuple[Tensor, Saved]:
        return x.new_empty((*x.shape[:-1], operands[2].shape[0])), ()


def add_parts(name: str, template: str, stage: PlannedStage, module: PlannedModule, call: Call) -> None:
    """Let rows hold a stage under a name, if they can, and its variants that keep tensors between calls."""
    plan, member = stage.plan, stage.linears[0]
    with reads_without_effect(module):
        weight, quantizer = module.weights[0], module.weight_held
        of_weight = quantizer and Held(quantizer, weight.dtype)
    shapes = ShapesOfGroup(stage.arity)
    held = call.input_held and Held(call.input_held, call.dtype), *[of_weight] * sum(stage.arity)
    shares, none = [plan.weight.may_share] * len(stage.linears), [False] * len(stage.linears)
    sources = plan.input.may_share, *map(bool, stage.ordered((False, False, shares, none)))
    part = Part(shapes, None, held, sources, input_grad=plan.input_grad, is_quantized=True, is_home=True)
    if stage is member:
        part.stage = LinearStage(plan.with_slots(lambda *_: ShapeSlot()) if plan.is_delayed else plan, GRADIENT)
        of_one = None if plan.is_shared else partial(of_module, template)
        sources = *sources[:-1], plan.seeds > 0  # a seed, beside the saved tensors
        recomputes = plan.input.backward is REENCODE_IN_GRAPH
        of_number = partial(stage_of, template) if not plan.is_shared else lambda _: member
        part = replace(part, of_module=of_one, sources=sources, recomputes=recomputes)
        PARTS[name] = replace(part, of_number=of_number, is_quantized=plan.is_quantized)
    for end, first in KEEPING.items():
        of_one, of_number = partial(keeping_of_module, template, first), partial(keeping_stage_of, template, first)
        PARTS[name + end] = replace(part, of_module=of_one, of_number=of_number, keeps=True)


def of_module(template: str, handle: Tensor, is_forward: bool) -> tuple[PlannedStage, Rows]:
    """The stage of the module that a handle names, and where its rows are remembered."""
    planner: Plans = owner_of(number_of(handle))
    stage = planner.follow(template)[1]
    if is_forward and stage.plan.weight.source is USE_HELD:
        _record_gathered(stage, planner.module.weights)
    return stage, planner.rows


def stage_of(template: str, number: str) -> PlannedStage:
    """The eager stage of the module of a number."""
    return owner_of(number).follow(template)[1]  # type: ignore[no-any-return]


def keeping_stage_of(template: str, first: bool | None, number: str) -> PlannedStage:
    """`stage_of` with the caches and sinks of the module. `first`: see `Planner.variant`."""
    return owner_of(number).eager_stage(template, first)  # type: ignore[no-any-return]


def keeping_of_module(template: str, first: bool | None, handle: Tensor, is_forward: bool) -> tuple[PlannedStage, Rows]:
    """`of_module` with the caches and sinks of the module. `first`: see `Planner.variant`."""
    _, rows = of_module(template, handle, is_forward)
    return keeping_stage_of(template, first, number_of(handle)), rows


def _record_gathered(stage: PlannedStage, weights: Sequence[Tensor]) -> None:
    """Record the amaxes of weights that FSDP2 gathered. Rows get their planes, which do not know them."""
    for linear, weight in zip(stage.linears, weights, strict=True):
        if records_amaxes(weight):
            operand = linear.plan.weight
            weight.gathers.record(operand.context.slots, operand.usage)  # type: ignore[attr-defined]
