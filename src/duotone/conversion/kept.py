"""What the default rules of convert keep in high precision besides what they name: output heads and adapters."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from duotone.conversion.adapters import adapters
from duotone.conversion.output_heads import heads
from duotone.recipes.recipe import Recipe
from duotone.recipes.roles import ANYWHERE, TENSOR_TYPES, QuantizerRole, Site
from duotone.recipes.rules import OUTPUT_HEAD, Rule, first_match

HEAD = "an output head, as {}"


@dataclass(frozen=True, kw_only=True)
class KeptRule(Rule):
    """Keeps the modules of these full names in high precision; `why` is the reason that plans show."""

    names: frozenset[str]
    why: str
    format: str | None = "identity"

    def __post_init__(self) -> None:
        """Nothing that a user could have written wrong."""

    def matches(self, role: QuantizerRole | None, site: Site = ANYWHERE) -> bool:
        return role is not None and role.name in self.names

    def to_dict(self) -> dict[str, Any]:
        return {"names": sorted(self.names), "format": self.format}


def with_kept(
    rules: Sequence[Rule], model: nn.Module, sites: Mapping[str, Site], recipes: Sequence[Recipe]
) -> tuple[Rule, ...]:
    """The rules; where the default ones are among them, also what keeps heads and adapters that no other rule names.

    Rules of the recipes that name such a module count too.
    """
    if not set(OUTPUT_HEAD) <= set(rules):
        return tuple(rules)
    named = [rule for recipe in recipes for rule in _rules_of(recipe) if rule.module or rule.module_regex]
    reasons = {name: HEAD.format(evidence) for name, evidence in heads(model).items()} | adapters(model)
    by_reason: dict[str, set[str]] = {}
    for name, reason in reasons.items():
        roles = [QuantizerRole("linear", kind, name) for kind in TENSOR_TYPES]
        mine = first_match(rules, QuantizerRole("linear", "weight", name), sites[name]) is not None
        if not mine and not any(rule.matches(role, sites[name]) for rule in named for role in roles):
            by_reason.setdefault(reason, set()).add(name)
    return (*rules, *(KeptRule(names=frozenset(names), why=_why(reason)) for reason, names in by_reason.items()))


def _why(reason: str) -> str:
    return f"{reason}: kept in high precision unless a rule names it"


def _rules_of(recipe: Recipe) -> Iterator[Rule]:
    """Of a recipe, its base, and its evaluation recipe."""
    yield from getattr(recipe, "rules", ())
    for other in (getattr(recipe, "base", None), recipe.evaluation):
        if other is not None:
            yield from _rules_of(other)
