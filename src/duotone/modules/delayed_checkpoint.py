"""recipe_state and load_recipe_state: the scales and histories of delayed scaling of a whole model."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from duotone.errors import UserError
from duotone.modules.delayed_states import STATES
from duotone.state.delayed import DelayedState
from duotone.state.seeds import require_memory


class Place(NamedTuple):
    """A delayed-scaling state that a module has, or may get: then its tensors wait in `saved` under `name`."""

    state: DelayedState | None
    saved: dict[str, dict[str, Tensor]]
    name: str


def recipe_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies on the CPU of all scales fp32 (n,) and amax histories fp32 (L, n) of delayed scaling, by full name."""
    tensors: dict[str, Tensor] = {}
    for prefix, (state, saved, name) in _places_in_memory(model).items():
        parts = saved.get(name, {}) if state is None else {part: state.get_buffer(part) for part in PARTS}
        tensors.update({f"{prefix}.{part}": tensor.detach().clone().cpu() for part, tensor in parts.items()})
    return tensors


def load_recipe_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Write the scales and histories of `recipe_state` back; those that no recipe has asked for yet wait for one.

    Raises UserError, before anything changes, unless `state` fits and has each state that the model has.
    """
    if not isinstance(state, dict):
        raise UserError(
            f"load_recipe_state takes what recipe_state gave, a dict of tensors; got {type(state).__name__}"
        )
    places = _places_in_memory(model)
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


def widest(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """States of `recipe_state` that clip the values of no rank: the largest amaxes, and the smallest scales."""
    names = {name for state in states for name in state}
    tensors = {name: torch.stack([state[name] for state in states if name in state]) for name in sorted(names)}
    return {name: t.amin(0) if name.endswith(".scale") else t.amax(0) for name, t in tensors.items()}


PARTS = {"scale": 1, "amax_history": 2}
"""The tensors of a state and their dimensions."""


def state_names(model: nn.Module) -> set[str]:
    """The names in `state_dict` of all states that the model has or may get."""
    return {f"{prefix}.{part}" for prefix in _places(model) for part in PARTS}


def _require_whole(prefix: str, state: DelayedState | None, parts: dict[str, Tensor]) -> None:
    slots = {tensor.shape[-1] for tensor in parts.values()} | ({state.scale.numel()} if state is not None else set())
    if parts.keys() != PARTS.keys() or len(slots) > 1 or parts["amax_history"].shape[0] == 0:
        raise UserError(f"{prefix!r} is not whole or has other slots; take recipe_state of a model like this one")
    if not bool((torch.isfinite(parts["scale"]) & (parts["scale"] > 0)).all()):
        raise UserError(f"'{prefix}.scale' holds what is no scale; it must be positive and finite")


def _places_in_memory(model: nn.Module) -> dict[str, Place]:
    """`_places`. UserError if a state is on meta."""
    places = _places(model)
    require_memory({name: place.state.scale for name, place in places.items() if place.state is not None})
    return places


def _places(model: nn.Module) -> dict[str, Place]:
    """Each state that the model has or may get, by full name."""
    if not isinstance(model, nn.Module):
        raise UserError(f"the states of a model were asked for; got {type(model).__name__}: pass the nn.Module")
    places: dict[str, Place] = {}
    for name, module in model.named_modules():
        if isinstance(module, DelayedState):
            places[name] = Place(module, {}, "")
        for state in STATES if "saved_states" in vars(module) else ():
            place = Place(None, module.saved_states, state)  # type: ignore[arg-type]
            places.setdefault(f"{name}.{state}".removeprefix("."), place)
    return places
