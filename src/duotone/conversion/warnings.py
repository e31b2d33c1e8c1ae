"""Warnings of convert, before it changes anything: rules without a match, and models that do not follow the recipe."""

import warnings
from collections.abc import Mapping, Sequence

from torch import nn

from duotone.attention import DotProductAttention
from duotone.conversion.default_rules import SURPRISING, KeptRule
from duotone.conversion.skipped import Reasons, is_quantized, wants_less
from duotone.conversion.targets import Target
from duotone.errors import RecipeError
from duotone.recipes.recipe import Recipe
from duotone.recipes.roles import BOUNDARIES, TENSOR_TYPES, QuantizerRole, Site
from duotone.recipes.rules import OUTPUT_HEAD, Rule, Subject, first_rule, undecided, unmatched
from duotone.tensor import Quantizer

Place = tuple[str, str, Site]
"""(module type, name, site) of a module that multiplies."""
Slots = Mapping[str, Quantizer]


def report_unmatched(recipe: Recipe, rules: tuple[Rule, ...], places: Sequence[Place]) -> None:
    """A warning for each rule that matches nothing; RecipeError if the recipe is strict."""
    for rule in unmatched_rules(recipe, rules, places):
        if recipe.strict:
            raise RecipeError(f"strict: the rule {rule.to_dict()} matches no tensor of the model; correct or remove it")
        warnings.warn(f"the rule {rule.to_dict()} matches no tensor of the model", stacklevel=3)


def unmatched_rules(recipe: Recipe, rules: tuple[Rule, ...], places: Sequence[Place]) -> list[Rule]:
    """The rules, of convert and of the recipe, that ask for a place or a size and decide nothing.

    Rules by type alone are for models in general; a model without such a tensor is no mistake.
    """
    kinds = (*TENSOR_TYPES, *BOUNDARIES)
    subjects = [(QuantizerRole(module, kind, name), site) for module, name, site in places for kind in kinds]
    useless = [rule for rule in unmatched(rules, subjects) if rule not in OUTPUT_HEAD]
    useless += _unmatched_in(recipe, undecided(rules, subjects))
    return [rule for rule in useless if rule.asks_for_place and any(rule.concerns(role) for role, _ in subjects)]


def _unmatched_in(recipe: Recipe, subjects: Sequence[Subject]) -> list[Rule]:
    """The unmatched rules of the recipe, of its base for subjects without a rule, and of `evaluation`."""
    rules = getattr(recipe, "rules", ())
    base = getattr(recipe, "base", None)
    below = [] if base is None else _unmatched_in(base, undecided(rules, subjects))
    evaluation = [] if recipe.evaluation is None else _unmatched_in(recipe.evaluation, subjects)
    return [*unmatched(rules, subjects), *below, *evaluation]


def warn_of_surprises(
    model: nn.Module,
    recipe: Recipe,
    rules: tuple[Rule, ...],
    sites: Mapping[str, Site],
    skipped: Reasons,
    planned: Sequence[tuple[Target, Slots]],
) -> None:
    """Warn if nothing follows the recipe, and if plain linears are left alone.

    `skipped` are the modules left alone; `planned` are the targets with the quantizers of their slots.
    """
    if not planned and not skipped:
        if not any(isinstance(module, DotProductAttention) for module in model.modules()):
            kind = type(model).__name__
            _warn(f"convert found nothing to convert: {kind} has no nn.Linear, no experts and no module of Duotone")
        return
    follows = any(is_quantized(slots) for _, slots in planned)
    suspects = {name: why.text for name, why in skipped.items() if not follows or why.reason in SURPRISING}
    passed = {name: text for name, text in suspects.items() if wants_less(name, recipe, rules, sites)}
    if follows and passed:
        _warn(f"{len(passed)} of the linears do not follow recipe {recipe.name}; {_listed(passed)}")
    elif not follows:
        default = {} if passed else _by_default([target for target, _ in planned], recipe, rules, sites)
        remedy = "; rules=() converts it too" if default else ""
        if passed or default:
            _warn(f"no linear follows recipe {recipe.name}; {_listed(passed or default)}{remedy}")


def _by_default(
    targets: Sequence[Target], recipe: Recipe, rules: tuple[Rule, ...], sites: Mapping[str, Site]
) -> dict[str, str]:
    """Targets that follow the recipe except for the default rules of convert, with the reason."""
    deciding = {t.name: first_rule(rules, QuantizerRole(t.module_type, "weight", t.name), t.site) for t in targets}
    default = {name: rule for name, rule in deciding.items() if isinstance(rule, KeptRule) or rule in OUTPUT_HEAD}
    return {name: rule.why for name, rule in default.items() if rule and wants_less(name, recipe, (), sites)}


def _listed(reasons: Mapping[str, str]) -> str:
    (name, reason), more = next(iter(reasons.items())), len(reasons) - 1
    others = f", and {more} more" if more else ""
    return f"left alone: {name or 'the model itself'} ({reason}){others}; duotone.plan(model) shows all"


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)
