"""The delayed-scaling states of a planned module: two submodules, there only while a recipe needs them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from duotone.errors import RecipeError, UserError
from duotone.linear.plan import BACKWARD_SLOTS, FORWARD_SLOTS, LinearPlan
from duotone.recipes.delayed import check_requests
from duotone.state.amax_mode import AmaxMode
from duotone.state.delayed import DelayedState
from duotone.tensor import History, Quantizer
from duotone.tensor.context import LOCAL, QuantizeContext

FORWARD_STATE, BACKWARD_STATE = "duotone_forward", "duotone_backward"
STATES = {FORWARD_STATE: FORWARD_SLOTS, BACKWARD_STATE: BACKWARD_SLOTS}


def agreed_history(plan: LinearPlan) -> History:
    """The one history of a plan's delayed slots. RecipeError where two slots disagree."""
    quantizers = {kind: operand.quantizer for kind, operand in plan.operands.items()}
    delayed = {kind: made for kind, made in quantizers.items() if any(made.delayed)}
    check_requests(delayed)
    return next((made.history for made in delayed.values() if made.history is not None), History())


def require_reduction(name: str, plan: LinearPlan, group: str) -> None:
    """RecipeError where shards of one tensor would be encoded with delayed scales that their ranks do not agree on."""
    sharded = ((plan.layout.input_shard, plan.input), (plan.layout.grad_shard, plan.gradient))
    alone = not group or not agreed_history(plan).reduce_amax
    if alone and any(shard is not None and any(operand.quantizer.delayed) for shard, operand in sharded):
        raise RecipeError(
            f"{name}: delayed scaling under sequence parallelism needs one scale on all ranks; keep reduce_amax and "
            "call it under duotone.autocast(recipe=..., amax_reduction_group=the tensor-parallel group)"
        )


def states_for(module: Any, plan: LinearPlan) -> tuple[str, str]:
    """The numbers of the forward and the backward state, made or adjusted to the plan; loaded values are taken up."""
    history = agreed_history(plan)
    members = len(module.weights)
    forward = _state(module, FORWARD_STATE, history)
    backward = _state(module, BACKWARD_STATE, history)
    forward.largest = [*_largest(plan.input.quantizer), *_largest(plan.weight.quantizer)] * members
    backward.largest = _largest(plan.gradient.quantizer) * members
    return forward.number, backward.number


def _state(module: Any, name: str, history: History) -> DelayedState:
    state = module._modules.get(name)
    if state is None:
        with torch.inference_mode(False):  # an inference tensor could not be written in training
            state = DelayedState(STATES[name] * len(module.weights), history, module.weight.device)
            saved = module._saved.pop(name, None)
            if saved is not None:
                state.load_state_dict(saved)
        module._modules[name] = state
    assert isinstance(state, DelayedState)
    unnamed = module.module_name.startswith("Layer_")  # counted in this process, and other ranks may count otherwise
    state.name = name if unnamed else f"{module.module_name}.{name}"
    state.adopt(history)
    return state


def drop(module: Any) -> None:
    """Give up both states; plans that name them have to be forgotten too."""
    for name in STATES:
        module._modules.pop(name, None)


def set_aside(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> dict[str, dict[str, Tensor]]:
    """Take the states out of a checkpoint that the module does not have (yet), by name."""
    found: dict[str, dict[str, Tensor]] = {}
    for name in STATES:
        start = f"{prefix}{name}."
        for key in [key for key in state_dict if key.startswith(start) and name not in module._modules]:
            found.setdefault(name, {})[key.removeprefix(start)] = state_dict.pop(key).detach().clone()
    return found


class Place(NamedTuple):
    """A delayed-scaling state that a module has, or may get: then its tensors wait in `saved` under `name`."""

    state: DelayedState | None
    saved: dict[str, dict[str, Tensor]]
    name: str


def recipe_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies on the CPU of all scales fp32 (n,) and amax histories fp32 (L, n) of delayed scaling, by full name."""
    found: dict[str, Tensor] = {}
    for prefix, (state, saved, name) in _places(model).items():
        parts = saved.get(name, {}) if state is None else {part: state.get_buffer(part) for part in PARTS}
        found.update({f"{prefix}.{part}": tensor.detach().clone().cpu() for part, tensor in parts.items()})
    return found


def load_recipe_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Write the scales and histories of `recipe_state` back; those that no recipe has asked for yet wait for one.

    Raises UserError, before anything changes, unless `state` fits and has each state that the model has.
    """
    if not isinstance(state, dict):
        raise UserError(
            f"load_recipe_state takes what recipe_state gave, a dict of tensors; got {type(state).__name__}"
        )
    places = _places(model)
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state.items():
        prefix, _, part = str(key).rpartition(".")
        if prefix not in places or part not in PARTS:
            raise UserError(f"{key!r} is no state of the model; convert it as it was when recipe_state was taken")
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32 or tensor.dim() != PARTS[part]:
            raise UserError(f"{key!r} must be an fp32 tensor of {PARTS[part]} dimensions, as recipe_state gives it")
        parts.setdefault(prefix, {})[part] = tensor
    for prefix, place in places.items():
        if place.state is not None or prefix in parts:
            _require_whole(prefix, place.state, parts.get(prefix, {}))
    for prefix, tensors in parts.items():
        place = places[prefix]
        if place.state is not None:
            place.state.load_state_dict(tensors)
        else:
            place.saved[place.name] = {part: tensor.detach().clone() for part, tensor in tensors.items()}


PARTS = {"scale": 1, "amax_history": 2}
"""The tensors of a state and their dimensions."""


def _require_whole(prefix: str, state: DelayedState | None, parts: dict[str, Tensor]) -> None:
    slots = {tensor.shape[-1] for tensor in parts.values()} | ({state.scale.numel()} if state is not None else set())
    if parts.keys() != PARTS.keys() or len(slots) > 1 or parts["amax_history"].shape[0] == 0:
        raise UserError(f"{prefix!r} is not whole or has other slots; take recipe_state of a model like this one")
    if not bool((torch.isfinite(parts["scale"]) & (parts["scale"] > 0)).all()):
        raise UserError(f"'{prefix}.scale' holds what is no scale; it must be positive and finite")


def _places(model: nn.Module) -> dict[str, Place]:
    """Each state that the model has or may get, by full name."""
    if not isinstance(model, nn.Module):
        raise UserError(f"the states of a model were asked for; got {type(model).__name__}: pass the nn.Module")
    found: dict[str, Place] = {}
    for name, module in model.named_modules():
        if isinstance(module, DelayedState):
            found[name] = Place(module, {}, "")
        saved = module.__dict__.get("_saved")
        if not isinstance(saved, dict):
            continue
        for state in STATES:
            found.setdefault(f"{name}.{state}".removeprefix("."), Place(None, saved, state))
    return found


def weight_context(module: Any, plan: LinearPlan, member: int = 0) -> QuantizeContext:
    """How to encode a weight with the scales that a state has already, recording nothing."""
    state = module._modules.get(FORWARD_STATE)
    return plan.with_slots(state.number, "", "", AmaxMode.USE, member).weight.context if state is not None else LOCAL


def _largest(made: Quantizer) -> list[float]:
    sides = zip((made.rowwise, made.columnwise), made.delayed, strict=True)
    return [fmt.largest if slot and fmt is not None else 0.0 for fmt, slot in sides]
