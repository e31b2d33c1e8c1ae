"""Accelerate: `prepare` of an Accelerator, around a model that follows a recipe."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from duotone.conversion import convert
from duotone.errors import UserError
from duotone.integrations.requirement import require
from duotone.integrations.run_state import RunState
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
        accelerator.register_for_checkpointing(RunState(model))
    return accelerator.prepare(*objects)
