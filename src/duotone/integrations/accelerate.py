"""Accelerate: `prepare` of an Accelerator, around a model that follows a recipe."""

import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from duotone.conversion import convert
from duotone.errors import UserError
from duotone.integrations.requirement import require
from duotone.integrations.run_state import RunState, packed_state
from duotone.modules.delayed_checkpoint import recipe_state
from duotone.modules.planned import Planned
from duotone.modules.same_recipes import require_same_recipes
from duotone.recipes.recipe import RecipeLike, as_recipe
from duotone.recipes.rules import OUTPUT_HEAD, Rule

require("accelerate", "1.1")

from accelerate import Accelerator  # noqa: E402


def prepare(
    accelerator: Accelerator, *objects: object, recipe: RecipeLike | None = None, rules: Sequence[Rule] = OUTPUT_HEAD
) -> Any:
    """Convert the models among `objects` in place, and return what `accelerator.prepare(*objects)` returns.

    - `recipe` and `rules` are those of `duotone.convert`. None leaves models as they are, converted before.
    - `save_state` then keeps seeds, delayed scales and planes, and `load_state` restores them: a run that resumes has
      the bits of one that went on.

    UserError if `mixed_precision` is "fp8", if no object is a model, or if nothing in them follows recipes.
    """
    if accelerator.mixed_precision == "fp8":
        raise UserError('mixed_precision="fp8" converts the model by another library; use "no" or "bf16" with a recipe')
    models = [item for item in objects if isinstance(item, nn.Module)]
    if not models:
        raise UserError("none of the objects is a model; pass the nn.Module that accelerator.prepare takes")
    for model in models:
        if recipe is not None:
            convert(model, as_recipe("prepare", recipe), rules)
    if not any(isinstance(module, Planned) for model in models for module in model.modules()):
        raise UserError("nothing in the model follows recipes: give prepare a recipe, or convert the model before")
    free = _forget_freed(accelerator)
    for model in models:
        require_same_recipes(model)
        _register(accelerator, _ModelState(model), free.pop(0) if free else len(accelerator._custom_objects))
    for number in reversed(free):
        del accelerator._custom_objects[number]
    accelerator.register_save_state_pre_hook(_with_own_memory)
    return accelerator.prepare(*objects)


def _with_own_memory(models: list[nn.Module], states: list[dict[str, Any]], folder: str) -> None:
    """Copy weights that share one memory: accelerate writes the first of them and drops the others."""
    del folder
    places = {parameter.data_ptr() for model in models for parameter in model.parameters() if _shares_memory(parameter)}
    for state in states:
        tensors = [(name, x) for name, x in state.items() if isinstance(x, Tensor) and _shares_memory(x)]
        state.update({name: x.clone() for name, x in tensors if x.data_ptr() in places})


def _shares_memory(x: Tensor) -> bool:
    """Whether a tensor is a part of a larger memory, as weights that run as one GEMM are."""
    return type(x) in (Tensor, nn.Parameter) and not x.is_meta and x.untyped_storage().nbytes() > x.nbytes


class _ModelState(RunState):
    """The state of a run with one model, which an Accelerator holds. It does not keep the model in memory."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(cast(nn.Module, weakref.proxy(model)))
        self.reference = weakref.ref(model)
        self.hooks: list[RemovableHandle] = []
        self.together: list[list[nn.Parameter]] = []
        """Parameters that shared one memory before a load, in their order in it."""

    def take_apart(self, models: list[nn.Module], folder: str) -> None:
        """Give parameters memory of their own before a load: safetensors loads no others. Then they share again."""
        del models, folder
        shared: dict[int, list[nn.Parameter]] = {}
        for parameter in () if (model := self.reference()) is None else model.parameters():
            if _shares_memory(parameter):
                shared.setdefault(parameter.untyped_storage().data_ptr(), []).append(parameter)
        self.together = [sorted(group, key=Tensor.data_ptr) for group in shared.values()]
        for parameter in [parameter for group in self.together for parameter in group]:
            parameter.data = parameter.detach().clone()

    def state_dict(self) -> dict[str, object]:
        """Empty if the model is gone, as after `accelerator.free_memory()`."""
        return {} if self.reference() is None else super().state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """UserError if the model is gone, or the state belongs to another one."""
        if self.reference() is None:
            raise UserError("the model of this state is gone from memory; call load_state after prepare")
        super().load_state_dict(state)
        for group in self.together:
            whole = torch.cat([parameter.detach() for parameter in group])
            for parameter, piece in zip(group, whole.split([len(each) for each in group]), strict=True):
                parameter.data = piece

    def is_in(self, modules: set[nn.Module]) -> bool:
        """Whether modules that follow recipes are among `modules`: an accelerator may wrap the model itself."""
        model = self.reference()
        return model is not None and any(isinstance(each, Planned) and each in modules for each in model.modules())


def _forget_freed(accelerator: Accelerator) -> list[int]:
    """The places of states whose models the accelerator has freed. Their hooks are removed."""
    prepared = {module for model in accelerator._models for module in model.modules()}
    free = []
    for number, state in enumerate(accelerator._custom_objects):
        if isinstance(state, _ModelState) and not state.is_in(prepared):
            free.append(number)
            for hook in state.hooks:
                hook.remove()
    return free


def _register(accelerator: Accelerator, state: _ModelState, number: int) -> None:
    """Let the accelerator save a state as its custom object of that number, which is part of the file's name."""
    accelerator._custom_objects[number : number + 1] = [state]
    state.hooks.append(accelerator.register_load_state_pre_hook(state.take_apart))
    if accelerator.num_processes > 1:
        state.hooks += _keep_own(accelerator, state, f"duotone_{number}_{accelerator.process_index}.txt")


def _keep_own(accelerator: Accelerator, state: _ModelState, file: str) -> list[RemovableHandle]:
    """Let each rank that saves write a file with its own state. Accelerate writes the objects of one rank.

    Nothing is gathered, because scripts may call `save_state` on one rank.
    """

    def save(models: object, weights: object, folder: str) -> None:
        if state.reference() is not None:
            (Path(folder) / file).write_text(packed_state(state.model))

    def load(models: object, folder: str) -> None:
        path = Path(folder) / file
        state.own = path.read_text() if path.is_file() else None
        if state.own is None and recipe_state(state.model):
            text = "so delayed scales are those of another rank, and the first steps may clip values"
            warnings.warn(f"{path} was not found, {text}", stacklevel=2)

    return [accelerator.register_save_state_pre_hook(save), accelerator.register_load_state_pre_hook(load)]
