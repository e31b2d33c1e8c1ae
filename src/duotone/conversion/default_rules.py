"""What the default rules of convert keep in high precision besides what they name: output heads and adapters."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from duotone.conversion.adapters import adapters
from duotone.conversion.output_heads import heads
from duotone.conversion.reasons import Reason, Why
from duotone.recipes.recipe import Recipe
from duotone.recipes.roles import ANYWHERE, TENSOR_TYPES, QuantizerRole, Site
from duotone.recipes.rules import OUTPUT_HEAD, Rule, first_match


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

    def to_dict(self) -> dict[str, object]:
        return {"names": sorted(self.names), "format": self.format}


def with_default_rules(
    rules: Sequence[Rule], model: nn.Module, sites: Mapping[str, Site], recipes: Sequence[Recipe]
) -> tuple[Rule, ...]:
    """The rules. If the default ones are among them: also rules for output heads and adapters that no other rule names.

    Rules of the recipes that name such a module count too.
    """
    if not set(OUTPUT_HEAD) <= set(rules):
        return tuple(rules)
    named = [rule for recipe in recipes for rule in _rules_of(recipe) if rule.module or rule.module_regex]
    reasons = {name: Why(Reason.OUTPUT_HEAD, evidence) for name, evidence in heads(model).items()}
    reasons |= {name: Why(Reason.ADAPTER, rank) for name, rank in adapters(model).items()}
    names: dict[str, set[str]] = {}
    for name, why in reasons.items():
        roles = [QuantizerRole("linear", kind, name) for kind in TENSOR_TYPES]
        decided = first_match(rules, QuantizerRole("linear", "weight", name), sites[name]) is not None
        if not decided and not any(rule.matches(role, sites[name]) for rule in named for role in roles):
            names.setdefault(why.text, set()).add(name)
    return (*rules, *(KeptRule(names=frozenset(group), why=text) for text, group in names.items()))


def _rules_of(recipe: Recipe) -> Iterator[Rule]:
    """Of a recipe, its base, and its evaluation recipe."""
    yield from getattr(recipe, "rules", ())
    for other in (getattr(recipe, "base", None), recipe.evaluation):
        if other is not None:
            yield from _rules_of(other)
