"""Accelerate: `prepare` of an Accelerator, around a model that follows a recipe."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from duotone.conversion import convert
from duotone.errors import UserError
from duotone.integrations.requirement import require
from duotone.integrations.run_state import RunState, packed_state
from duotone.planned.delayed_checkpoint import recipe_state
from duotone.planned.planned import Planned
from duotone.planned.same_recipes import require_same_recipes
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
    for model in models:
        require_same_recipes(model)
        state = RunState(model)
        accelerator.register_for_checkpointing(state)
        if accelerator.num_processes > 1:
            number = len(accelerator._custom_objects) - 1
            _keep_own(accelerator, state, f"duotone_{number}_{accelerator.process_index}.txt")
    return accelerator.prepare(*objects)


def _keep_own(accelerator: Accelerator, state: RunState, file: str) -> None:
    """Let each rank that saves write a file with its own state. Accelerate writes the objects of one rank.

    Nothing is gathered, because scripts may call `save_state` on one rank.
    """

    def save(models: object, weights: object, folder: str) -> None:
        (Path(folder) / file).write_text(packed_state(state.model))

    def load(models: object, folder: str) -> None:
        path = Path(folder) / file
        state.own = path.read_text() if path.is_file() else None
        if state.own is None and recipe_state(state.model):
            text = "so delayed scales are those of another rank, and the first steps may clip values"
            warnings.warn(f"{path} was not found, {text}", stacklevel=2)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
