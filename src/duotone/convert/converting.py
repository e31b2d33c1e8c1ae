"""convert and revert: models in place.

A converted nn.Linear only changes its class: parameters, names, hooks and state_dict keys stay as they were. Experts
that are held as 3-D parameters keep those too.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from duotone.attention import DotProductAttention
from duotone.convert import experts
from duotone.convert.left_alone import left_alone, refuse_left_alone, with_heads
from duotone.convert.matching import Place, report_unmatched
from duotone.convert.naming import sites_of
from duotone.convert.targets import CONVERTED, original_class, targets
from duotone.errors import UserError
from duotone.ops.planned import Planned
from duotone.recipes.recipe import Recipe, require_recipe
from duotone.recipes.rules import OUTPUT_HEAD, Rule
from duotone.recipes.schedule import Phase, Schedule
from duotone.state.autocast import HIGH_PRECISION
from duotone.tensor import Quantizer


def convert(model: nn.Module, recipe: Recipe | Schedule, rules: Sequence[Rule] = OUTPUT_HEAD) -> nn.Module:
    """Make every nn.Linear, and all linears of experts, follow `recipe`, in place, and return the model.

    `rules` go before any recipe, enclosing autocasts included; the default keeps the output head in high precision.
    A schedule is checked phase by phase, and its first recipe becomes the modules' own. Modules of Duotone take the
    recipe, their rules and full names too. Subclasses of nn.Linear with a forward of their own and other modules that
    hold matrices are left alone; `plan` shows them, and under `strict` they are an error unless rule or recipe asks for
    high precision. Rules that match nothing are a warning and a plan row. Raises before it changes anything where a
    recipe cannot be used.
    """
    _validate(recipe, rules)
    sites = sites_of(model)
    all_rules = with_heads(rules, model, sites)
    phases = recipe.phases if isinstance(recipe, Schedule) else (Phase(recipe, 0),)
    first = phases[0].recipe
    left = left_alone(model)
    found = targets(model, left, sites)
    given: dict[str, dict[str, Quantizer]] = {}
    for phase in reversed(phases):
        for used in (phase.recipe, phase.recipe.evaluation):
            if used is not None and used.strict:
                refuse_left_alone(left, used, all_rules, sites)
        for target in found:
            given[target.name] = target.check(phase, all_rules)
    places: list[Place] = [(target.module_type, target.name, target.site) for target in found]
    places += [("linear", name, sites[name]) for name in left]
    for phase in phases:
        report_unmatched(phase.recipe, all_rules, places)
    for target in found:
        target.adopt(first, all_rules, given[target.name])
    _tell_the_rest(model, first, [target.name for target in found])
    return model


def _tell_the_rest(model: nn.Module, recipe: Recipe, named: Sequence[str]) -> None:
    """Names and recipe for modules of Duotone that are no targets themselves: attention, and owners of linears."""
    sites = sites_of(model)
    for name, module in model.named_modules():
        take = getattr(module, "take_name", None)
        if callable(take) and name and name not in named and not isinstance(module, Planned):
            take(name, sites[name])
        if isinstance(module, DotProductAttention):
            module.recipe = recipe


def revert(model: nn.Module) -> nn.Module:
    """Undo `convert`, in place, and return the model: every module gets its class back, and seeds and states go.

    Modules that were built from Duotone stay what they are, in high precision. Quantized parameters stay as they are;
    `convert_parameters(model, HighPrecision())` makes them plain before. Raises UserError, before anything changes,
    where a module was parametrized after it was converted.
    """
    for name, module in model.named_modules():
        if isinstance(module, Planned) and is_parametrized(module):  # type: ignore[arg-type]
            raise UserError(f"{name} was parametrized after it was converted; remove its parametrizations first")
    for module in list(model.modules()):
        if issubclass(type(module), experts.PlannedExperts):
            experts.release_experts(module)
        elif isinstance(module, Planned):
            _release(module)
        elif isinstance(module, DotProductAttention):
            module.recipe = HIGH_PRECISION
    return model


def _release(module: Any) -> None:
    if isinstance(module, experts.ExpertsLinear):
        return  # its owner lets go of it
    if module.__dict__.pop(CONVERTED, False):
        module.release()
        module.__class__ = original_class(type(module))
    else:
        module.adopt(HIGH_PRECISION, (), module.module_name, module.site)


def _validate(recipe: Recipe | Schedule, rules: Sequence[Rule]) -> None:
    if not isinstance(recipe, Schedule):
        require_recipe("convert", recipe)
    wrong = [rule for rule in rules if not isinstance(rule, Rule)]
    if wrong:
        raise UserError(f"rules are duotone.recipes.Rule values; got {type(wrong[0]).__name__}")
