"""Pipelines as bound calls: their forwards, and what runs the backward of each."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from duotone.pipeline.autograd import Backward, differentiate, run_forward
from duotone.pipeline.bound import Bindings
from duotone.pipeline.stage import Gradients, Stages, unpack
from duotone.tensor.context import Slot


def bindings_of(forward: Stages, backward: Backward) -> Bindings | None:
    """What runs the forwards of stages as bound calls. None where stages run themselves."""
    if backward.again is None or not all(stage.is_bindable for stage in (*forward, *backward.stages)):
        return None
    slots = [slot for stage in forward for slot in stage.slots]
    return Bindings(partial(_forward_and_backward, forward, slots, backward), slots)


def opened_stages(stages: Stages, slots: Sequence[Slot], opened: Sequence[Slot]) -> Stages:
    """The stages of one call. They open their slots themselves if `opened` is empty."""
    of_call = dict(zip(slots, opened, strict=True)) if opened else {}
    return tuple([stage.opened(of_call) for stage in stages]) if opened else stages


def _forward_and_backward(
    stages: Stages, slots: Sequence[Slot], backward: Backward, opened: Sequence[Slot], tensors: list[Any]
) -> tuple[Any, ...]:
    """The results of `run_forward`, and what runs the backward of this call."""
    of_gradients = [slot for stage in backward.stages for slot in stage.gradient_slots]
    of_backward = Bindings(partial(_backward, backward.stages, of_gradients), of_gradients)
    x, *operands = tensors
    return *run_forward(opened_stages(stages, slots, opened), backward.again, x, tuple(operands)), of_backward


def _backward(
    stages: Stages, slots: Sequence[Slot], opened: Sequence[Slot], tensors: list[Any], *others: Any
) -> Gradients:
    """The gradients of x and the operands, from those of the outputs and the saved tensors behind them."""
    shells, extra, needs = others
    handed, outputs, saved = [tensors[0]], tensors[1 : 1 + extra], unpack(shells, tensors[1 + extra :])
    tensors.clear()
    del saved[-1]  # what second derivatives need
    return None, None, *differentiate(opened_stages(stages, slots, opened), handed, outputs, saved, needs)
