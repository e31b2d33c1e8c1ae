"""The delayed-scaling states of a planned module: two submodules, which exist only while a recipe needs them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from duotone.comm import group_ranks
from duotone.dispatch.stages import amax_of
from duotone.errors import RecipeError
from duotone.linear.operand_plan import OperandPlan
from duotone.linear.plan import BACKWARD_SLOTS, FORWARD_SLOTS, LinearPlan
from duotone.modules.base import PlannedModule
from duotone.modules.parametrizations import weights_of
from duotone.pipeline.titles import title
from duotone.recipes.delayed import check_requests
from duotone.recipes.roles import Site
from duotone.sharding.dtensors import shard_behind, shard_of
from duotone.state import rolling
from duotone.state.delayed import DelayedState
from duotone.state.delayed_slot import DelayedSlot
from duotone.state.region import AmaxMode
from duotone.state.torch_private import is_faking, real_tensors
from duotone.tensor import History, QuantizedTensor, Quantizer
from duotone.tensor.context import QuantizeContext
from duotone.tensor.history import clips
from duotone.tensor.plane_tensor import PlaneTensor, plain

FORWARD_STATE, BACKWARD_STATE = "duotone_forward", "duotone_backward"
FIRST = {"input": 0, "weight": 2}
"""The rowwise slot of an operand among those of its linear in the forward state."""

GROWTH = 1.25
"""How far one optimizer step takes the largest magnitude of a weight at the most."""
STATES = {FORWARD_STATE: FORWARD_SLOTS, BACKWARD_STATE: BACKWARD_SLOTS}


def agreed_history(quantizers: Mapping[str, Quantizer]) -> History:
    """The one history of a module's delayed slots, by tensor. RecipeError if two slots disagree."""
    delayed = {kind: quantizer for kind, quantizer in quantizers.items() if any(quantizer.delayed)}
    check_requests(delayed)
    return next((quantizer.history for quantizer in delayed.values() if quantizer.history is not None), History())


def require_reduction(module: object, plan: LinearPlan, group: str) -> None:
    """RecipeError if ranks would encode shards of one tensor with different delayed scales."""
    layout = plan.layout
    sharded = zip(layout.shards, plan.operands.values(), strict=True)
    if not any(shard is not None and any(operand.quantizer.delayed) for shard, operand in sharded):
        return
    if not group or not agreed_history(plan.quantizers).reduce_amax:
        raise RecipeError(
            f"{title(module)}: delayed scaling of shards of one tensor needs one scale on all ranks; keep reduce_amax "
            "and call it under duotone.autocast(recipe=..., amax_reduction_group=the tensor-parallel group)"
        )
    if group != layout.group and not group_ranks(layout.group) <= group_ranks(group):
        raise RecipeError(
            f"{title(module)}: amax_reduction_group {group!r} leaves out ranks that hold shards of the same tensors; "
            "give a group that contains the tensor-parallel one"
        )


def states_for(module: PlannedModule, plan: LinearPlan, device: torch.device | None = None) -> tuple[str, str]:
    """The numbers of the forward and the backward state, created or adjusted to the plan, with loaded values.

    `device`: where the module computes, if its weights are elsewhere now.
    """
    history = agreed_history(plan.quantizers)
    members = module.num_gemms
    device = device or weights_of(module)[0].device
    forward = state_of(module, FORWARD_STATE, FORWARD_SLOTS * members, history, device)
    backward = state_of(module, BACKWARD_STATE, BACKWARD_SLOTS * members, history, device)
    forward.largest = largest_of(plan, members)
    backward.largest = largest(plan.gradient.quantizer) * members
    return forward.number, backward.number


def states_of_call(module: PlannedModule, plan: LinearPlan, group: str, mode: AmaxMode) -> tuple[str, str]:
    """Like `states_for`. A state that is a copy then rolls when its original does."""
    numbers = states_for(module, plan)
    if mode is not AmaxMode.USE:
        rolling.wait_like_original(numbers[0], group)
    return numbers


def with_slots(plan: LinearPlan, numbers: tuple[str, str], group: str, mode: AmaxMode, member: int = 0) -> LinearPlan:
    """The plan for the `member`-th linear of a module whose forward and backward state have these numbers."""
    forward, backward = numbers

    def slot(operand: str, side: int) -> DelayedSlot:
        if operand == "gradient":
            return DelayedSlot(backward, member * BACKWARD_SLOTS + side, group, AmaxMode.RECORD, backward=True)
        of_call = AmaxMode.FIT if operand == "weight" and mode is AmaxMode.USE else mode
        return DelayedSlot(forward, member * FORWARD_SLOTS + FIRST[operand] + side, group, of_call)

    return plan.with_slots(slot)


class HoldsStates(Protocol):
    """A module with delayed states, which lie among its submodules."""

    module_name: str
    site: Site
    saved_states: dict[str, dict[str, Tensor]]
    _modules: dict[str, nn.Module | None]


def state_of(
    module: HoldsStates, name: str, slots: int, history: History, device: torch.device | str | None
) -> DelayedState:
    """The state of that name, created or adjusted to the history, with loaded values."""
    state = module._modules.get(name)
    if state is None:
        with torch.inference_mode(False), real_tensors():  # an inference tensor could not be written in training
            state = DelayedState(slots, history, device)
            saved = module.saved_states.pop(name, None)
            if saved is not None:
                state.load_state_dict(saved)
        module._modules[name] = state
    assert isinstance(state, DelayedState)
    if state.scale.is_meta:  # a checkpoint without states was assigned to a model on meta
        state.to_empty(device=device)
    state.name = f"{name_on_all_ranks(module)}.{name}".removeprefix(".")
    state.adopt(history)
    return state


def name_on_all_ranks(module: HoldsStates) -> str:
    """The name of a module. Empty for `Layer_<n>`, which each process counts alone."""
    counted = not module.site.named or module.module_name.startswith("Layer_")  # the latter where it is a model itself
    return "" if counted else module.module_name


def save(module: PlannedModule) -> None:
    """Set both states aside until a recipe needs them again, like states of a checkpoint."""
    for name in STATES:
        state = module._modules.get(name)
        if state is not None:
            module.saved_states[name] = {part: tensor.clone() for part, tensor in state.state_dict().items()}
    drop(module)


def forget(module: PlannedModule) -> None:
    """Make all slots new: the next amax of each decides its scale."""
    for name in STATES:
        state = module._modules.get(name)
        if isinstance(state, DelayedState):
            state.forget(range(len(state.largest)))


def drop(module: PlannedModule) -> None:
    """Remove both states. The caller also forgets the plans that refer to them."""
    for name in STATES:
        module._modules.pop(name, None)


def set_aside(module: HoldsStates, state_dict: dict[str, Tensor], prefix: str) -> dict[str, dict[str, Tensor]]:
    """Take states that the module does not have (yet) out of a checkpoint. Returns them by name."""
    states: dict[str, dict[str, Tensor]] = {}
    for name in STATES:
        start = f"{prefix}{name}."
        for key in [key for key in state_dict if key.startswith(start) and name not in module._modules]:
            states.setdefault(name, {})[key.removeprefix(start)] = state_dict.pop(key).detach().clone()
    return states


def start_anew(
    module: HoldsStates, state_dict: dict[str, Tensor], prefix: str, weights: Mapping[str, nn.Parameter]
) -> None:
    """Make all slots new, if a checkpoint has weights of the module, but not its states. `weights`: by key."""
    loaded = [(parameter.shape, state_dict[key]) for key, parameter in weights.items() if key in state_dict]
    fits = bool(loaded) and all(shape == getattr(value, "shape", None) for shape, value in loaded)
    for name in STATES if fits else ():  # torch refuses another shape
        state = module._modules.get(name)
        if isinstance(state, DelayedState) and f"{prefix}{name}.scale" not in state_dict:
            state.forget(range(len(state.largest)))


def prepare_load(module: PlannedModule, state_dict: dict[str, Tensor], prefix: str) -> None:
    """Fit the scales to the weights of a checkpoint: its scales, new ones if it has none or if they would clip.

    A module loads its parameters before its states, and clipped values of quantized weights stay clipped. All ranks
    with a shard call this.
    """
    start_anew(module, state_dict, prefix, {prefix + name: p for name, p in module.named_parameters(recurse=False)})
    state, start = module._modules.get(FORWARD_STATE), f"{prefix}{FORWARD_STATE}."
    if not isinstance(state, DelayedState):
        return
    if (has_scale := f"{start}scale" in state_dict) and not state.scale.is_meta:
        state._load_from_state_dict(state_dict, start, {}, False, [], [], [])
    for name, parameter in module._parameters.items():
        if parameter is None or not isinstance(weight := shard_of(parameter), QuantizedTensor):
            continue
        values = shard_of(state_dict.get(prefix + name, weight))
        if values.shape == weight.shape and not isinstance(values, PlaneTensor):  # torch refuses another shape
            slots = [slot.index for slot in weight.context.slots if isinstance(slot, DelayedSlot)]
            if slots and (not has_scale or _clips(state, slots[0], weight, values)):
                state.forget(slots)
                # the state loads after this, and torch completes a state_dict with the model's own
                state_dict.update({f"{start}{part}": value.clone() for part, value in state.state_dict().items()})


def renew_outgrown(module: PlannedModule) -> bool:
    """Make all slots new if a weight is far above the range of its scale. Returns whether it was.

    So are weights that something other than training wrote after their last forward.
    """
    state = module._modules.get(FORWARD_STATE)
    if not isinstance(state, DelayedState) or state.scale.is_meta:
        return False
    for member, weight in enumerate(map(plain, map(shard_of, weights_of(module)))):
        amax = amax_of(weight.detach().reshape(len(weight), -1)).to(state.scale.device)
        first = member * FORWARD_SLOTS + FIRST["weight"]
        for slot in range(first, first + 2):
            if state.largest[slot] and bool(amax * state.scale[slot] > GROWTH * state.largest[slot]):
                for each in map(module._modules.get, STATES):
                    if isinstance(each, DelayedState):
                        each.forget(range(len(each.largest)))
                return True
    return False


def attach(weight: QuantizedTensor, operand: OperandPlan) -> None:
    """Let writes of a held weight, and of the shard behind it, follow the slots of its plan.

    The scale of a slot may clip a weight that was written while it followed no slots, or others, as a copy does before
    its first forward. Then the slot starts anew, with a scale that fits.
    """
    context, shard = operand.context, shard_behind(weight)
    is_held = shard is not weight or weight.gathers is None  # else FSDP2 gathered planes of a plain weight
    is_new = is_held and shard.context.slots != context.slots and not is_faking()
    for held in (weight, shard):
        held.context = QuantizeContext(held.context.shard, context.slots, propagate=context.propagate)
    if is_new:
        weight.fit_slots()


def _clips(state: DelayedState, slot: int, weight: QuantizedTensor, values: Tensor) -> bool:
    """Whether the scale of a slot clips new values of a weight, on any rank with a shard of it; none on meta."""
    if values.is_meta or state.scale.is_meta:
        return False
    amax = amax_of(values.detach().reshape(len(values), -1)).to(state.scale.device)
    amax = amax if weight.context.shard is None else weight.context.shard.max(amax)
    return bool(clips(amax, state.scale[slot], state.largest[slot]))


def weight_context(module: PlannedModule, plan: LinearPlan, member: int = 0) -> QuantizeContext:
    """The context that encodes a weight for storage, and records nothing. Codes are uint8.

    The scale is that of the module's state if it does not clip the weight, else it follows from the weight. A state of
    another plan, or one that Ctrl-C left without its limits, does not count.
    """
    state, limits = module._modules.get(FORWARD_STATE), largest_of(plan, module.num_gemms)
    if not isinstance(state, DelayedState) or state.largest != limits:
        device = weights_of(module)[member].device
        state = DelayedState(FORWARD_SLOTS * module.num_gemms, agreed_history(plan.quantizers), device)
        state.largest = limits
    return replace(with_slots(plan, (state.number, ""), "", AmaxMode.USE, member).weight.context, typed=False)


def largest_of(plan: LinearPlan, members: int) -> list[float]:
    """`largest` of all slots of a forward state."""
    return [*largest(plan.input.quantizer), *largest(plan.weight.quantizer)] * members


def largest(quantizer: Quantizer) -> list[float]:
    """The largest magnitude of the element of each slot of a quantizer, 0 for a direction without one."""
    sides = zip((quantizer.rowwise, quantizer.columnwise), quantizer.delayed, strict=True)
    return [fmt.largest if slot and fmt is not None else 0.0 for fmt, slot in sides]
