"""nn.Module to low precision in place, back again, and the table of what will run.

A converted nn.Linear only changes its class: parameters, names, hooks and state_dict keys stay as they were.
"""

import functools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from duotone.errors import RecipeError, UserError
from duotone.linear import Setting, build_plan
from duotone.linear.plan import ask_recipe
from duotone.ops.linear import Linear, PlannedLinear
from duotone.ops.naming import sites_of
from duotone.ops.op import held
from duotone.ops.planned import Planned
from duotone.recipes.recipe import Recipe
from duotone.recipes.roles import TENSOR_TYPES, QuantizerRole, Site
from duotone.recipes.rules import OUTPUT_HEAD, Rule, first_match, unmatched
from duotone.recipes.schedule import Phase, Schedule
from duotone.tensor import Quantizer


@dataclass(frozen=True)
class PlanRow:
    """One GEMM of one module, or one module that stays as it is (`gemm` is "-")."""

    module: str
    gemm: str
    a: str
    b: str
    kernel: str
    native: bool
    reason: str

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


FAST_PATH = (
    "in evaluation without gradients its fast path uses the weights of its linears without calling them; "
    "torch.backends.mha.set_fastpath_enabled(False) turns that off"
)


def convert(model: nn.Module, recipe: Recipe | Schedule, rules: Sequence[Rule] = OUTPUT_HEAD) -> nn.Module:
    """Make every nn.Linear of `model` follow `recipe`, in place, and return the model.

    `rules` go before any recipe, enclosing autocasts included; the default keeps the output head in high precision.
    A schedule is checked phase by phase, and its first recipe becomes the modules' own. Subclasses of nn.Linear with a
    forward of their own are left alone; `plan` shows them. Rules that match nothing are a warning and a plan row.
    Raises before it changes anything where a recipe cannot be used.
    """
    _validate(recipe, rules)
    rules, sites = tuple(rules), sites_of(model)
    phases = recipe.phases if isinstance(recipe, Schedule) else (Phase(recipe, 0),)
    first = phases[0].recipe
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    converted = {name: module for name, module in linears if not _reason_left_alone(module)}
    given: dict[str, dict[str, Quantizer]] = {}
    for phase in reversed(phases):
        for used in (phase.recipe, phase.recipe.evaluation):
            if used is not None:
                _refuse_left_alone(linears, used)
        for name, module in converted.items():
            given[name] = _check(module, name, phase, rules, sites[name])
    for phase in phases:
        _report_unmatched(phase.recipe, rules, [(name, sites[name]) for name in converted])
    for name, module in converted.items():
        _adopt(module, first, rules, name, sites[name], given[name])
    return model


def _refuse_left_alone(linears: Sequence[tuple[str, nn.Linear]], recipe: Recipe) -> None:
    for name, module in linears:
        if recipe.strict and _reason_left_alone(module):
            raise RecipeError(f"strict: {name} stays in high precision: {_reason_left_alone(module)}")


def _check(module: nn.Linear, name: str, phase: Phase, rules: tuple[Rule, ...], site: Site) -> dict[str, Quantizer]:
    """Build the plan of one module in one phase; gives what the recipe gave its slots."""
    setting = Setting(phase.recipe, rules, name, "linear", module.weight.device.type, module.weight.dtype, site=site)
    given = ask_recipe(setting)
    holding = None if phase.convert_parameters else held(module.weight)
    build_plan(replace(setting, weight_held=holding), given)
    if phase.recipe.evaluation is not None:
        build_plan(replace(setting, recipe=phase.recipe.evaluation, weight_held=holding, input_grad=False))
    return given


def _report_unmatched(recipe: Recipe, rules: tuple[Rule, ...], places: Sequence[tuple[str, Site]]) -> None:
    for rule in unmatched_rules(recipe, rules, places):
        if recipe.strict:
            raise RecipeError(f"strict: the rule {rule.to_dict()} matches no tensor of the model; correct or remove it")
        warnings.warn(f"the rule {rule.to_dict()} matches no tensor of the model", stacklevel=3)


def unmatched_rules(recipe: Recipe, rules: tuple[Rule, ...], places: Sequence[tuple[str, Site]]) -> list[Rule]:
    """The rules that ask for a place or a size and decide nothing there: those of the recipe, and convert's own ones.

    Rules by type alone are for models in general; that a model has no such tensor is no mistake.
    """
    subjects = [(QuantizerRole("linear", kind, name), site) for name, site in places for kind in TENSOR_TYPES]
    asked = () if rules == OUTPUT_HEAD else rules
    left = [subject for subject in subjects if first_match(rules, *subject) is None]
    found = [*unmatched(asked, subjects), *_unmatched_in(recipe, left)]
    return [rule for rule in found if rule.asks_for_place and any(rule.concerns(role) for role, _ in subjects)]


def _unmatched_in(recipe: Recipe, subjects: Sequence[tuple[QuantizerRole, Site]]) -> list[Rule]:
    """Of the recipe, of its base where its own rules leave a subject, and of its evaluation recipe."""
    rules = getattr(recipe, "rules", ())
    found = unmatched(rules, subjects)
    base = getattr(recipe, "base", None)
    if base is not None:
        found += _unmatched_in(base, [subject for subject in subjects if first_match(rules, *subject) is None])
    return found + ([] if recipe.evaluation is None else _unmatched_in(recipe.evaluation, subjects))


def revert(model: nn.Module) -> nn.Module:
    """Undo `convert`, in place, and return the model: every module gets its class back, and seeds and states go.

    Quantized parameters stay as they are; `convert_parameters(model, HighPrecision())` makes them plain before. Raises
    UserError, before anything changes, where a module was parametrized after it was converted.
    """
    for name, module in model.named_modules():
        if isinstance(module, Planned) and is_parametrized(module):  # type: ignore[arg-type]
            raise UserError(f"{name} was parametrized after it was converted; remove its parametrizations first")
    for module in model.modules():
        if isinstance(module, Planned):
            assert isinstance(module, nn.Module)
            module.release()
            module.__class__ = _original_class(type(module))
    return model


def plan(
    model: nn.Module,
    recipe: Recipe | None = None,
    *,
    device: str | None = None,
    dtype: torch.dtype | None = None,
) -> list[PlanRow]:
    """What runs for each GEMM of each linear of a converted model, and what stays in high precision and why.

    `recipe` stands for an enclosing autocast; device and dtype are the weights' where None.
    """
    rows: list[PlanRow] = []
    for name, module in model.named_modules():
        if isinstance(module, PlannedLinear):
            rows.extend(_rows(name, module, recipe or module.recipe, device, dtype))
        elif isinstance(module, nn.Linear):
            rows.append(_left_alone(name, _reason_left_alone(module) or "not converted"))
        elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
            rows.append(_left_alone(name, "an embedding is a look-up, not a GEMM"))
        elif isinstance(module, nn.TransformerEncoderLayer):
            rows.append(_left_alone(name, FAST_PATH))
    planned = [module for module in model.modules() if isinstance(module, PlannedLinear)]
    if planned:
        places = [(module.module_name, module.site) for module in planned]
        for rule in unmatched_rules(recipe or planned[0].recipe, planned[0].rules, places):
            rows.append(_left_alone("a rule", f"matches no tensor of the model: {rule.to_dict()}"))
    return rows


def _rows(
    name: str, module: PlannedLinear, recipe: Recipe, device: str | None, dtype: torch.dtype | None
) -> Iterator[PlanRow]:
    made = module.plan_of(recipe, device or module.weight.device.type, dtype or module.weight.dtype)
    for gemm in made.gemms:
        yield PlanRow(name, gemm.gemm, gemm.a.name, gemm.b.name, gemm.rule.name, gemm.rule.native, gemm.reason)


def _left_alone(name: str, reason: str) -> PlanRow:
    return PlanRow(name, "-", "identity", "identity", "torch", True, reason)


def _reason_left_alone(module: nn.Linear) -> str:
    """Why convert leaves a linear as it is, or "" where it converts."""
    kind = type(module)
    if isinstance(module, PlannedLinear):
        return ""
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    if kind is nn.Linear:
        return ""
    if kind is nn.modules.linear.NonDynamicallyQuantizableLinear:
        return "its owner uses the weight without calling the module"
    if kind.forward is not nn.Linear.forward:
        return f"{kind.__name__} has a forward of its own"
    return ""


@functools.cache
def _converted_class(kind: type[nn.Linear]) -> type[nn.Linear]:
    if kind is nn.Linear:
        return Linear
    members = {"__module__": kind.__module__, "__reduce__": lambda self: (_rebuild, (kind,), self.__getstate__())}
    return type(f"Planned{kind.__name__}", (PlannedLinear, kind), members)


def _rebuild(kind: type[nn.Linear]) -> nn.Module:
    """An empty module of the class that a subclass of nn.Linear converts to, for pickle to fill."""
    return _converted_class(kind).__new__(_converted_class(kind))


def _original_class(kind: type) -> type:
    return next(base for base in kind.__mro__ if issubclass(base, nn.Linear) and not issubclass(base, PlannedLinear))


def _adopt(
    module: nn.Linear, recipe: Recipe, rules: tuple[Rule, ...], name: str, site: Site, given: dict[str, Quantizer]
) -> None:
    if not isinstance(module, PlannedLinear):
        module.__class__ = _converted_class(type(module))  # type: ignore[arg-type]
    assert isinstance(module, PlannedLinear)
    module.adopt(recipe, rules, name, site, given)
    module.prepare(recipe)


def _validate(recipe: Recipe | Schedule, rules: Sequence[Rule]) -> None:
    if not isinstance(recipe, Recipe | Schedule):
        raise UserError(f"convert takes a recipe; got {type(recipe).__name__}; use duotone.recipes.load(name)")
    wrong = [rule for rule in rules if not isinstance(rule, Rule)]
    if wrong:
        raise UserError(f"rules are duotone.recipes.Rule values; got {type(wrong[0]).__name__}")
