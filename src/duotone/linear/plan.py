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
from duotone.recipes.roles import PLANES_OF_GEMM, TENSOR_TYPES, QuantizerRole
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
    """What forward and backward follow. Usages and sources say which planes are made, kept, and read back.

    `input_grad` and `weight_grad` are the gradients that backward owes; without them nothing is kept for it.
    """

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
    input_grad: bool
    weight_grad: bool
    seeds: int
    """Stochastic quantizes of one forward and backward: how far the module's seed advances."""

    @property
    def gemms(self) -> Iterator[GemmPlan]:
        return iter((self.fprop, self.dgrad, self.wgrad))


def build_plan(setting: Setting) -> LinearPlan:
    """Resolve a setting. Raises RecipeError where the recipe is strict and a GEMM would fall back."""
    quantizers = {tensor_type: _quantizer(setting, tensor_type) for tensor_type in TENSOR_TYPES}
    source = SOURCES[setting.recipe.backward_override]
    if not source.needs_columnwise:
        quantizers["grad_output"] = Quantizer()
    grad_output = quantizers["grad_output"]
    operands = {
        "fprop": (quantizers["input"].rowwise, quantizers["weight"].rowwise),
        "dgrad": (grad_output.rowwise, source.format(quantizers["weight"])),
        "wgrad": (grad_output.columnwise, source.format(quantizers["input"])),
    }
    gemms = {gemm: _gemm(setting, gemm, *formats) for gemm, formats in operands.items()}
    columnwise, backward = source.needs_columnwise, setting.input_grad or setting.weight_grad
    return LinearPlan(
        input=quantizers["input"],
        weight=quantizers["weight"],
        grad_output=grad_output,
        source=source,
        input_usage=Usage(True, columnwise and setting.weight_grad),
        weight_usage=Usage(True, columnwise and setting.input_grad),
        grad_usage=Usage(setting.input_grad, setting.weight_grad),
        fprop=gemms["fprop"],
        dgrad=gemms["dgrad"],
        wgrad=gemms["wgrad"],
        input_grad=setting.input_grad,
        weight_grad=setting.weight_grad,
        seeds=sum(made.is_stochastic for kind, made in quantizers.items() if backward or kind != "grad_output"),
    )


def _role(setting: Setting, tensor_type: str) -> QuantizerRole:
    return QuantizerRole(setting.module_type, tensor_type, setting.name)


def _quantizer(setting: Setting, tensor_type: str) -> Quantizer:
    role = _role(setting, tensor_type)
    return first_match(setting.rules, role) or setting.recipe(role)


def _gemm(setting: Setting, gemm: str, a: Format | None, b: Format | None) -> GemmPlan:
    name = setting.name or "a linear"
    if a is None or b is None:
        raise RecipeError(f"the recipe gives {gemm} of {name} only one operand; give the other a format")
    rule, reason = choose(GemmProblem(a, b, setting.device, setting.dtype))
    full = (a is IDENTITY, b is IDENTITY)
    if setting.recipe.strict and any(full) and not all(full):
        raise RecipeError(
            f"strict: {gemm} of {name} pairs {a.name} with {b.name}, so it would run in high precision; "
            "give both operands a format, or set strict to false"
        )
    if not all(full) and setting.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise RecipeError(f"{name} is in {setting.dtype}; formats encode bf16, fp16 and fp32: cast the model first")
    if all(full):
        reason = "the recipe keeps both operands in high precision"
    if all(full) and all(first_match(setting.rules, _role(setting, kind)) for kind, _ in PLANES_OF_GEMM[gemm]):
        reason = "kept in high precision by a rule"
    return GemmPlan(gemm, a, b, rule, reason)
