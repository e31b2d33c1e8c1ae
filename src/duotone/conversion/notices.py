"""What convert says where a model does not follow the recipe that it was given: warnings, before anything changes."""

import warnings
from collections.abc import Mapping, Sequence

from torch import nn

from duotone.attention import DotProductAttention
from duotone.conversion.kept import KeptRule
from duotone.conversion.left_alone import LAZY, REPLACED, is_quantized, wants_less
from duotone.conversion.targets import Target
from duotone.recipes.recipe import Recipe
from duotone.recipes.roles import QuantizerRole, Site
from duotone.recipes.rules import OUTPUT_HEAD, Rule, first_rule
from duotone.tensor import Quantizer

SURPRISING = (REPLACED, LAZY)
"""Reasons for which a plain nn.Linear is left alone."""

Slots = Mapping[str, Quantizer]


def warn_of_surprises(
    model: nn.Module,
    recipe: Recipe,
    rules: tuple[Rule, ...],
    sites: Mapping[str, Site],
    left: Mapping[str, str],
    planned: Sequence[tuple[Target, Slots]],
) -> None:
    """Say where nothing follows the recipe, and which plain linears are left alone.

    `left` are the reasons by name; `planned` are the targets with what the recipe gives their slots.
    """
    if not planned and not left:
        if not any(isinstance(module, DotProductAttention) for module in model.modules()):
            kind = type(model).__name__
            _warn(f"convert found nothing to convert: {kind} has no nn.Linear, no experts and no module of Duotone")
        return
    follows = any(is_quantized(slots) for _, slots in planned)
    suspects = {name: reason for name, reason in left.items() if not follows or is_surprising(reason)}
    passed = {name: reason for name, reason in suspects.items() if wants_less(name, recipe, rules, sites)}
    if follows and passed:
        _warn(f"{len(passed)} of the linears do not follow recipe {recipe.name}; {_listed(passed)}")
    elif not follows:
        kept = {} if passed else _kept_by_default([target for target, _ in planned], recipe, rules, sites)
        remedy = "; rules=() converts it too" if kept else ""
        if passed or kept:
            _warn(f"no linear follows recipe {recipe.name}; {_listed(passed or kept)}{remedy}")


def _kept_by_default(
    targets: Sequence[Target], recipe: Recipe, rules: tuple[Rule, ...], sites: Mapping[str, Site]
) -> dict[str, str]:
    """Targets that would follow the recipe but for the default rules of convert, with the reason."""
    deciding = {t.name: first_rule(rules, QuantizerRole(t.module_type, "weight", t.name), t.site) for t in targets}
    default = {name: rule for name, rule in deciding.items() if isinstance(rule, KeptRule) or rule in OUTPUT_HEAD}
    return {name: rule.why for name, rule in default.items() if rule and wants_less(name, recipe, (), sites)}


def is_surprising(reason: str) -> bool:
    return any(words in reason for words in SURPRISING)


def _listed(reasons: Mapping[str, str]) -> str:
    (name, reason), more = next(iter(reasons.items())), len(reasons) - 1
    others = f", and {more} more" if more else ""
    return f"left alone: {name or 'the model itself'} ({reason}){others}; duotone.plan(model) shows all"


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)
