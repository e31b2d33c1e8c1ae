"""The state of a run besides its weights, as one text: seeds, and the scales and histories of delayed scaling."""

import base64
import io
import warnings
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from duotone.errors import UserError
from duotone.modules import delayed_states
from duotone.modules.delayed_checkpoint import load_recipe_state, recipe_state, state_names, widest
from duotone.modules.parametrizations import weights_of
from duotone.modules.planned import Planned
from duotone.state.seeds import load_rng_state, rng_state
from duotone.tensor import QuantizedTensor

KEY = "duotone"
"""The key of the text in files of other libraries."""


def packed_state(model: nn.Module, of_all_ranks: bool = False) -> str:
    """`rng_state` and `recipe_state` of a model, and the names of its recipes.

    With `of_all_ranks` every rank has to call it: each gets the states of all, which differ under delayed scaling.
    """
    own = {"rng": rng_state(model), "recipe": recipe_state(model)}
    states: list[Any] = [own] * (dist.get_world_size() if of_all_ranks and dist.is_initialized() else 1)
    if len(states) > 1:
        dist.all_gather_object(states, own)
    content = {**states[0], "names": recipe_names(model)}
    if any(not _same(state, states[0]) for state in states):
        content["ranks"] = states
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return base64.b64encode(zlib.compress(buffer.getvalue())).decode("ascii")


def _same(state: Mapping[str, dict[str, Tensor]], other: Mapping[str, dict[str, Tensor]]) -> bool:
    return all(
        state[kind].keys() == other[kind].keys()
        and all(torch.equal(tensor, other[kind][name]) for name, tensor in state[kind].items())
        for kind in ("rng", "recipe")
    )


def recipe_names(model: nn.Module) -> str:
    """The recipes that the modules of a model follow."""
    return " and ".join(sorted({module.recipe.name for module in model.modules() if isinstance(module, Planned)}))


def load_packed_state(model: nn.Module, text: str) -> None:
    """Restore what `packed_state` gave. UserError if the text is damaged or belongs to another model or recipe."""
    rng, recipe, then = _unpacked(text)
    now = recipe_names(model)
    if then != now:
        remedy = "convert it as it was saved, or start from the weights"
        raise UserError(f"the checkpoint was saved under {then}, and the model follows {now}; {remedy}")
    if recipe_state(model).keys() - recipe.keys() or rng_state(model).keys() != rng.keys():
        raise UserError("the checkpoint has seeds and scales of another model or recipe; convert it as it was saved")
    load_recipe_state(model, recipe)
    load_rng_state(model, rng)


def load_common_state(model: nn.Module, text: str, prefix: str = "") -> None:
    """Restore what `packed_state` gave as far as the model has the same modules; others stay as they are.

    `prefix`: before the names of modules in a model with a head, and not in the model below it.
    """
    rng, recipe, _ = _unpacked(text)
    seeds, states = rng_state(model), recipe_state(model)
    for saved, current, names in ((rng, seeds, seeds.keys()), (recipe, states, state_names(model))):
        for name, tensor in saved.items():
            place = next((each for each in (name, name.removeprefix(prefix), prefix + name) if each in names), None)
            if place is not None and current.get(place, tensor).shape[-1:] == tensor.shape[-1:]:
                current[place] = tensor
    load_recipe_state(model, states)
    load_rng_state(model, seeds)


def _unpacked(text: str) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    """Seeds, delayed states, and the names of recipes: those of this rank, if as many ranks saved them."""
    try:
        states: dict[str, Any] = torch.load(io.BytesIO(zlib.decompress(base64.b64decode(text))))
        ranks = states.get("ranks", [])
        if not ranks:
            return states["rng"], states["recipe"], states["names"]
        if dist.is_initialized() and len(ranks) == dist.get_world_size():
            states = {**states, **ranks[dist.get_rank()]}
        else:
            states["recipe"] = widest([state["recipe"] for state in ranks])
        return states["rng"], states["recipe"], states["names"]
    except (ValueError, KeyError, TypeError, EOFError, RuntimeError, zlib.error) as error:
        raise UserError(f"the seeds and scales of a checkpoint cannot be read ({error!r}); save it again") from None


def renew_outgrown_scales(model: nn.Module) -> None:
    """Make delayed scales new that clip the weights of a checkpoint, with a warning."""
    outgrown: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, Planned) and not weights_of(module)[0].is_meta:  # else a state would be on meta, too
            module.plans.prepare(module.recipe)
            outgrown += [name] if delayed_states.renew_outgrown(module) else []
    if outgrown:
        words = f"{outgrown[0]} and {len(outgrown) - 1} others have" if len(outgrown) > 1 else f"{outgrown[0]} has"
        warnings.warn(
            f"{words} weights beyond their saved delayed scales, as after a merge; these scales start anew",
            stacklevel=2,
        )


class RunState:
    """`packed_state` and the planes of quantized parameters, for trainers that save what has a `state_dict`.

    With `of_all_ranks` every rank has to call `state_dict`.
    """

    def __init__(self, model: nn.Module, of_all_ranks: bool = False) -> None:
        self.model, self.of_all_ranks = model, of_all_ranks
        self.own: str | None = None
        """The state of this rank, if it comes from a file of its own."""

    def state_dict(self) -> dict[str, object]:
        """Seeds and scales as bytes, and the planes of quantized parameters."""
        return {KEY: packed_state(self.model, self.of_all_ranks), "planes": quantized_parameters(self.model)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """UserError if the state belongs to another model, recipe or format."""
        if KEY not in state:
            raise UserError("the checkpoint has no seeds and scales of Duotone; start from its weights")
        load_packed_state(self.model, self.own or state[KEY])
        if not write_planes(self.model, state["planes"]):
            raise UserError("the checkpoint has planes of other parameters or formats; convert them as they were saved")


def save_planes(model: nn.Module, path: Path, identity: str) -> None:
    """Write the planes of quantized parameters, which files in high precision do not hold."""
    torch.save({"identity": identity, "planes": quantized_parameters(model)}, path)


def load_planes(model: nn.Module, paths: Iterable[Path], identity: str) -> bool:
    """Write the planes of the first file with that identity back. False if no file has it, or fits."""
    for path in paths:
        saved = torch.load(path, weights_only=True) if path.is_file() else {}
        if saved.get("identity") == identity and write_planes(model, saved.get("planes", {})):
            return True
    return False


def write_planes(model: nn.Module, saved: Mapping[str, QuantizedTensor]) -> bool:
    """Write planes of `quantized_parameters` back. False, before anything changes, if the formats differ.

    Writes count for no optimizer, whose masters belong to these planes.
    """
    tensors = quantized_parameters(model)
    if _formats(tensors) != _formats(saved):
        return False
    for name, tensor in tensors.items():
        for plane, other in zip(tensor.planes, saved[name].planes, strict=True):
            if plane is not None and other is not None:
                plane.copy_(other)
    return True


def quantized_parameters(model: nn.Module) -> dict[str, QuantizedTensor]:
    """The quantized parameters by full name, detached."""
    return {name: p.detach() for name, p in model.named_parameters() if isinstance(p, QuantizedTensor)}  # type: ignore


def _formats(tensors: Mapping[str, QuantizedTensor]) -> dict[str, object]:
    return {name: (tensor.shape, tensor.formats) for name, tensor in tensors.items()}


def hide_states(model: nn.Module) -> None:
    """Take the scales and histories of delayed scaling out of the state_dict, which plain models then load."""
    if _drop_states in model._state_dict_hooks.values():
        return
    model.register_state_dict_post_hook(_drop_states)
    model.register_load_state_dict_pre_hook(_fill_states)


def _drop_states(module: nn.Module, tensors: dict[str, Tensor], prefix: str, metadata: object) -> None:
    for name in state_names(module):
        tensors.pop(prefix + name, None)


def _fill_states(module: nn.Module, tensors: dict[str, Tensor], prefix: str, *args: object) -> None:
    for name, tensor in recipe_state(module).items():
        tensors.setdefault(prefix + name, tensor)
