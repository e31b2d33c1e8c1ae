"""What a module of attention does before a forward under a recipe, outside of traces."""

import contextlib
from typing import Any

import torch
from torch import nn

from duotone.numbered import Numbered, constant_in_traces
from duotone.pipeline.slot_roles import KnownRoles
from duotone.recipes.recipe import Recipe, recipe_of
from duotone.state.autocast_context import active_region
from duotone.state.region import CallRegion, in_backward, mode_now

_MODULES: "Numbered[FollowsRecipes]" = Numbered()


class FollowsRecipes(KnownRoles, nn.Module):
    """Calls `prepare_recipe(recipe)` before each forward. It must be cheap for the recipe of the last call.

    `forget` makes graphs of the module be traced again.
    """

    _number: str

    def __init__(self) -> None:
        super().__init__()
        self.forget()

    def prepare_recipe(self, recipe: Recipe) -> None:
        """Prepare for calls under a recipe. RecipeError if the module cannot follow it."""
        raise NotImplementedError

    def keeps_high_precision(self, recipe: Recipe) -> bool:
        """Whether a recipe leaves this module in high precision."""
        return False

    def share(self, recipe: Recipe) -> None:
        """Prepare traced calls under a recipe. Their graph serves all modules that are alike."""
        self.prepare_recipe(recipe)

    def is_shared(self, recipe: Recipe) -> bool:
        """Whether `share` was called under a recipe."""
        raise NotImplementedError

    def forget(self) -> None:
        """Prepare anew for every recipe."""
        self._number = _MODULES.add(self)
        self._region = CallRegion()

    def recipe_of_call(self, default: Recipe) -> tuple[Recipe, str]:
        """The recipe of this call, now prepared, and the group of its amaxes. A recompute has those of its forward."""
        compiling = torch.compiler.is_dynamo_compiling()
        region = active_region() if compiling else self._region.now(mode_now())
        recipe, group = (default, "") if region is None else (region.recipe, region.group)
        if recipe.evaluation is not None and not self.training:
            recipe = recipe.evaluation
        if compiling:
            _ask(recipe.key)
            if not self.keeps_high_precision(recipe) and not self.is_shared(recipe):
                _share(self._number, recipe.key)  # errors of the recipe pass through
        elif not in_backward():  # a recompute follows its forward
            self.prepare_recipe(recipe)
        return recipe, group

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_region"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.forget()


@constant_in_traces
def _ask(recipe: str) -> str:
    """Ask a recipe for all modules before a trace reads its answer for one of them. Then guards hold for the others.

    A factory that fails for one of them fails again when that one is called.
    """
    for module in list(_MODULES.values()):
        with contextlib.suppress(Exception):  # the user's function may raise anything
            if not module.keeps_high_precision(recipe_of(recipe)):
                module.share(recipe_of(recipe))
    return recipe


@constant_in_traces
def _share(number: str, recipe: str) -> str:
    _MODULES[number].share(recipe_of(recipe))
    return recipe
