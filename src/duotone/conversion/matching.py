"""Rules that match nothing in a model: a mistake that nothing else would tell."""

import warnings
from collections.abc import Sequence

from duotone.errors import RecipeError
from duotone.recipes.recipe import Recipe
from duotone.recipes.roles import BOUNDARIES, TENSOR_TYPES, QuantizerRole, Site
from duotone.recipes.rules import OUTPUT_HEAD, Rule, Subject, undecided, unmatched

Place = tuple[str, str, Site]
"""(module type, name, site) of what a model multiplies with."""


def report_unmatched(recipe: Recipe, rules: tuple[Rule, ...], places: Sequence[Place]) -> None:
    """A warning for each rule that matches nothing; RecipeError where the recipe is strict."""
    for rule in unmatched_rules(recipe, rules, places):
        if recipe.strict:
            raise RecipeError(f"strict: the rule {rule.to_dict()} matches no tensor of the model; correct or remove it")
        warnings.warn(f"the rule {rule.to_dict()} matches no tensor of the model", stacklevel=3)


def unmatched_rules(recipe: Recipe, rules: tuple[Rule, ...], places: Sequence[Place]) -> list[Rule]:
    """The rules that ask for a place or a size and decide nothing there: those of the recipe, and convert's own ones.

    Rules by type alone are for models in general; that a model has no such tensor is no mistake.
    """
    kinds = (*TENSOR_TYPES, *BOUNDARIES)
    subjects = [(QuantizerRole(module, kind, name), site) for module, name, site in places for kind in kinds]
    given = OUTPUT_HEAD if set(OUTPUT_HEAD) <= set(rules) else ()
    found = [rule for rule in unmatched(rules, subjects) if rule not in given]
    found += _unmatched_in(recipe, undecided(rules, subjects))
    return [rule for rule in found if rule.asks_for_place and any(rule.concerns(role) for role, _ in subjects)]


def _unmatched_in(recipe: Recipe, subjects: Sequence[Subject]) -> list[Rule]:
    """Of the recipe, of its base where its own rules leave a subject, and of its evaluation recipe."""
    rules = getattr(recipe, "rules", ())
    found = unmatched(rules, subjects)
    base = getattr(recipe, "base", None)
    if base is not None:
        found += _unmatched_in(base, undecided(rules, subjects))
    return found + ([] if recipe.evaluation is None else _unmatched_in(recipe.evaluation, subjects))
