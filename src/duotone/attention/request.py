"""What a recipe gives the slots of attention."""

from duotone.recipes.recipe import Recipe
from duotone.recipes.roles import QuantizerRole, Site
from duotone.recipes.rules import RuleRecipe, first_match
from duotone.tensor.quantizer import Quantizer

SLOTS = {"qkv": 3, "s": 3, "do": 2, "dp": 2}
"""The tensors that attention's products multiply, with their slots: three each in forward, two in backward."""


def answer(recipe: Recipe, role: QuantizerRole, site: Site) -> Quantizer:
    """What the recipe gives a slot of attention. Strict rules without a word on attention leave it as it is."""
    if not isinstance(recipe, RuleRecipe):
        return recipe.quantizer(role, site)
    found = first_match(recipe.rules, role, site, recipe.history)
    return found or (Quantizer() if recipe.base is None else answer(recipe.base, role, site))
