"""Targets of convert: a linear, a module of Duotone, or the linears of a module of experts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from duotone.conversion import experts, forwards
from duotone.conversion.forwards import CONVERTED
from duotone.conversion.naming import named_modules
from duotone.conversion.skipped import Reasons
from duotone.conversion.transposed import TransposedLinear, is_transposed
from duotone.linear.plan import PlanRequest, ask_recipe
from duotone.linear.plan_builder import build_plan
from duotone.modules.base import Call, PlannedModule
from duotone.modules.linear import Linear, PlannedLinear
from duotone.modules.planned import Planned
from duotone.recipes.recipe import Recipe
from duotone.recipes.roles import Site
from duotone.recipes.rules import Rule
from duotone.recipes.schedule import Phase
from duotone.tensor import Quantizer
from duotone.tensor.quantizer import quantizer_of

PARAMETRIZED = "_parametrized_class"
"""The attribute of a class that convert made for a parametrized module: the class that torch had given it."""


@dataclass(frozen=True)
class Target:
    """A target of convert: `module`, or the linears of a module of experts over its `parameter`.

    `name` is the name in roles, `weight` one of the weights. `grads`: whether input and weight may need gradients.
    """

    name: str
    site: Site
    module_type: str
    weight: Tensor
    module: nn.Module
    parameter: str = ""
    grads: tuple[bool, bool] = (True, True)

    def check(self, phases: Sequence[Phase], rules: tuple[Rule, ...]) -> dict[str, Quantizer]:
        """The quantizers of the slots in the first phase. Raises if the plan of a phase cannot be built."""
        slots: list[dict[str, Quantizer]] = []
        for phase in phases:
            request = self._request(phase.recipe, rules)
            slots.append(ask_recipe(request))
            in_memory = None if phase.convert_parameters else quantizer_of(self.weight)
            build_plan(replace(request, weight_held=in_memory), slots[-1])
            if phase.recipe.evaluation is not None:
                build_plan(replace(request, recipe=phase.recipe.evaluation, weight_held=in_memory, input_grad=False))
        return slots[0]

    def adopt(self, recipe: Recipe, rules: tuple[Rule, ...], slots: dict[str, Quantizer]) -> None:
        """Change the class of the module in place, and give it the recipe, the rules and its quantizers by slot.

        Its mark says so first, and says last that the module is complete: see `release`.
        """
        if not isinstance(self.module, Planned):
            self.module.__dict__[CONVERTED] = False
        module = self._converted()
        module.adopt(recipe, rules, self.name, self.site, slots)
        module.plans.prepare(recipe)
        forwards.move_states_to_hooks_device(module)
        if CONVERTED in self.module.__dict__:
            self.module.__dict__[CONVERTED] = True

    def _converted(self) -> Planned:
        """The module that follows plans, after a change of class if it needs one."""
        if self.parameter:
            return experts.adopt_experts(self.module)[self.parameter]
        if not isinstance(self.module, Planned):
            is_special = is_parametrized(self.module)
            kind = _parametrized_class(self.module) if is_special else converted_class(type(self.module))
            forwards.change_class(self.module, kind)
        return self.module  # type: ignore[return-value]

    def _request(self, recipe: Recipe, rules: tuple[Rule, ...]) -> PlanRequest:
        device, dtype = str(self.weight.device), self.weight.dtype
        if not isinstance(self.module, Planned):
            linears = self.weight.shape[0] if self.module_type == "grouped_linear" else 1
            fields = (self.name, self.module_type, device, dtype, *self.grads)
            return PlanRequest(recipe, rules, *fields, site=self.site, linears=linears)
        request = self.module.plans.request(recipe, Call(device, dtype, self.grads))
        return replace(request, rules=rules, name=self.name, site=self.site)


def release(module: nn.Module) -> None:
    """Take away all that convert gave a module with the mark, and its class; the mark goes last.

    An interrupt may stop this, or the conversion, at any line: another call completes it.
    """
    module.__dict__[CONVERTED] = False
    if issubclass(type(module), experts.PlannedExperts):
        experts.release_experts(module)
    else:
        Planned.release(module)  # type: ignore[arg-type]  # the class may be the plain one again
        forwards.change_class(module, original_class(type(module)))
    del module.__dict__[CONVERTED]


def targets(model: nn.Module, skipped: Reasons, sites: Mapping[str, Site]) -> list[Target]:
    """Everything in `model` that can follow plans, in its order."""
    trained = trains(model)
    every = _targets(model, skipped, sites)
    return [replace(target, grads=(trained, trained and target.weight.requires_grad)) for target in every]


def trains(model: nn.Module) -> bool:
    """Whether backward may compute gradients: the model is in training mode, and a parameter requires one."""
    return model.training and any(parameter.requires_grad for parameter in model.parameters())


def _targets(model: nn.Module, skipped: Reasons, sites: Mapping[str, Site]) -> Iterator[Target]:
    for name, module in named_modules(model):
        if isinstance(module, experts.ExpertsLinear):
            continue  # its owner is the target
        if isinstance(module, Planned):
            yield Target(name, sites[name], module.module_type, module.weight, module)
        elif isinstance(module, nn.Linear) and name not in skipped:
            yield Target(name, sites[name], "linear", module.weight, module)
        elif is_transposed(module) and name not in skipped:
            weight: Tensor = module.weight  # type: ignore[assignment]
            yield Target(name, replace(sites[name], shape=tuple(weight.shape[::-1])), "linear", weight, module)
        elif name not in skipped and (
            experts.holds_experts(module) or issubclass(type(module), experts.PlannedExperts)
        ):
            is_transposed_parameter = getattr(module, "is_transposed", False)
            for parameter in experts.linear_names(module):
                weight = getattr(module, parameter)
                shape = tuple(weight.shape[:0:-1] if is_transposed_parameter else weight.shape[1:])
                full_name, site = f"{name}.{parameter}".removeprefix("."), replace(sites[name], shape=shape)
                yield Target(full_name, site, "grouped_linear", weight, module, parameter)


def converted_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The planned class that modules of a class get."""
    if kind is nn.Linear:
        return Linear
    return forwards.planned_class(PlannedLinear if issubclass(kind, nn.Linear) else TransposedLinear, kind)


def _parametrized_class(module: nn.Module) -> type[nn.Module]:
    """The planned class of a parametrized module, whose class from torch has a property for each tensor.

    When torch removes the parametrizations, it gives the module the first base of its class: the converted class.
    """
    kind = type(module)
    members = {name: vars(kind)[name] for name in _properties(kind)}
    bases = (converted_class(kind.__bases__[0]),)
    return type(kind.__name__, bases, {"__module__": kind.__module__, PARAMETRIZED: kind, **members})


def parametrized_since(module: nn.Module) -> bool:
    """Whether a planned module has other parametrizations than when its class was changed."""
    if not is_parametrized(module):
        return False
    before = vars(type(module)).get(PARAMETRIZED)
    return before is None or _properties(before) != _properties(type(module))


def _properties(kind: type) -> set[str]:
    return {name for name, value in vars(kind).items() if isinstance(value, property)}


def original_class(kind: type) -> type:
    """The class from which `converted_class` came."""
    if PARAMETRIZED in vars(kind):
        return vars(kind)[PARAMETRIZED]
    return next(base for base in kind.__mro__ if issubclass(base, nn.Module) and not issubclass(base, PlannedModule))
