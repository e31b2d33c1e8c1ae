"""The plan of a linear: recipe, roles, gradients needed and device, resolved once into three GEMMs.

Execution reads no mode; it follows the plan. A plan is frozen and hashable, and its rows say which kernel runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from duotone.dispatch.gemms import GemmProblem, GemmRule, choose
from duotone.errors import RecipeError
from duotone.formats import IDENTITY, Format
from duotone.linear.source import SOURCES, Source
from duotone.recipes.recipe import Recipe
from duotone.recipes.roles import GEMMS, QuantizerRole
from duotone.recipes.rules import Rule, first_match
from duotone.tensor.quantizer import Quantizer, Usage


@dataclass(frozen=True)
class Setting:
    """All that decides a plan: what the module is asked to do, and where."""

    recipe: Recipe
    rules: tuple[Rule, ...]
    name: str
    module_type: str
    device: str
    dtype: torch.dtype
    input_grad: bool = True
    weight_grad: bool = True


@dataclass(frozen=True)
class GemmPlan:
    """One GEMM: operand formats, the rule that runs it, and what the rule has to say."""

    gemm: str
    a: Format
    b: Format
    rule: GemmRule
    reason: str


@dataclass(frozen=True)
class LinearPlan:
    """What forward and backward follow. Usages and sources say which planes are made, kept, and read back."""

    input: Quantizer
    weight: Quantizer
    grad_output: Quantizer
    source: Source
    input_usage: Usage
    weight_usage: Usage
    grad_usage: Usage
    fprop: GemmPlan
    dgrad: GemmPlan
    wgrad: GemmPlan
    seeds: int
    """Stochastic quantizes of one forward and backward: how far the module's seed advances."""

    @property
    def gemms(self) -> Iterator[GemmPlan]:
        return iter((self.fprop, self.dgrad, self.wgrad))


def build_plan(setting: Setting) -> LinearPlan:
    """Resolve a setting. Raises RecipeError where the recipe is strict and a GEMM would fall back."""
    input, weight, grad_output = (
        _quantizer(setting, tensor_type) for tensor_type in ("input", "weight", "grad_output")
    )
    source = SOURCES[setting.recipe.backward_override]
    if not source.needs_columnwise:
        grad_output = Quantizer()
    operands = {
        "fprop": (_plane(setting, input.rowwise), _plane(setting, weight.rowwise)),
        "dgrad": (_plane(setting, grad_output.rowwise), source.format(weight)),
        "wgrad": (_plane(setting, grad_output.columnwise), source.format(input)),
    }
    gemms = {gemm: _gemm(setting, gemm, *operands[gemm]) for gemm in GEMMS}
    columnwise = source.needs_columnwise
    return LinearPlan(
        input=input,
        weight=weight,
        grad_output=grad_output,
        source=source,
        input_usage=Usage(True, columnwise and setting.weight_grad),
        weight_usage=Usage(True, columnwise and setting.input_grad),
        grad_usage=Usage(setting.input_grad, setting.weight_grad),
        **gemms,
        seeds=sum(quantizer.is_stochastic for quantizer in (input, weight, grad_output)),
    )


def _quantizer(setting: Setting, tensor_type: str) -> Quantizer:
    role = QuantizerRole(setting.module_type, tensor_type, setting.name)
    return first_match(setting.rules, role) or setting.recipe(role)


def _plane(setting: Setting, fmt: Format | None) -> Format:
    if fmt is None:
        raise RecipeError(f"the recipe gives {setting.name or 'a linear'} no rowwise plane; give it a format")
    return fmt


def _gemm(setting: Setting, gemm: str, a: Format, b: Format) -> GemmPlan:
    rule, reason = choose(GemmProblem(a, b, setting.device, setting.dtype))
    one_sided = (a is IDENTITY) != (b is IDENTITY)
    if setting.recipe.strict and one_sided and setting.recipe.backward_override is None:
        raise RecipeError(
            f"strict: {gemm} of {setting.name or 'a linear'} pairs {a.name} with {b.name}, "
            "so it would run in high precision; give both operands a format, or set strict to false"
        )
    return GemmPlan(gemm, a, b, rule, reason)
