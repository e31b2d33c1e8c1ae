"""What convert leaves as it is although it may multiply by a matrix, and why."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from duotone.conversion import experts, hooked
from duotone.conversion.bypassed import BYPASSED, bypassed
from duotone.conversion.output_heads import heads
from duotone.errors import RecipeError
from duotone.formats import IDENTITY
from duotone.linear.plan import PlanRequest, ask_recipe
from duotone.planned.planned import Planned
from duotone.recipes.recipe import Recipe
from duotone.recipes.roles import TENSOR_TYPES, Site
from duotone.recipes.rules import Rule
from duotone.tensor import Quantizer

HEAD = "an embedding is a look-up, and its owner uses the weight as output head without calling a module"
REPLACED = "its forward was replaced on the instance"
LAZY = "it has no weight before its first forward; run one, then call duotone.convert again"
NO_GEMM = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, ParametrizationList)
"""Modules whose matrices are looked up, or multiplied element by element, or another module's."""


def left_alone(model: nn.Module) -> dict[str, str]:
    """The modules that convert leaves as they are although they may multiply by a matrix, with the reason."""
    reasons = {name: reason_left_alone(module) for name, module in model.named_modules()}
    modules = dict(model.named_modules())
    embeddings = {name: HEAD for name in heads(model) if isinstance(modules[name], nn.Embedding)}
    return {name: reason for name, reason in (reasons | bypassed(model) | embeddings).items() if reason}


def reason_left_alone(module: nn.Module) -> str:
    """Why convert leaves a module with matrices as it is, or "" where it converts or where there is nothing to do."""
    if isinstance(module, (Planned, *NO_GEMM)) or issubclass(type(module), experts.PlannedExperts):
        return ""
    if hasattr(module, "stays_in_high_precision"):  # says so itself
        return ""
    if isinstance(module, nn.Linear):
        return _reason_of_linear(module)
    own = module.named_parameters(recurse=False)
    matrices = [f"{name} {tuple(weight.shape)}" for name, weight in own if not is_lazy(weight) and weight.dim() > 1]
    if not matrices:
        return ""
    held = f"{type(module).__name__} holds {' and '.join(matrices)} itself"
    if not experts.holds_experts(module):
        return f"{held}; convert covers nn.Linear"
    if hooked.is_replaced(module):
        return f"{held}, and {REPLACED} by {hooked.replacement(module)}"
    reason = experts.reason_left_alone(module)
    return f"{held}, and {reason}" if reason else ""


def _reason_of_linear(module: nn.Linear) -> str:
    kind = type(module)
    if hooked.is_replaced(module):
        return f"{REPLACED} by {hooked.replacement(module)}"
    if kind is nn.Linear:
        return ""
    if isinstance(module, LazyModuleMixin):
        return LAZY
    if kind is nn.modules.linear.NonDynamicallyQuantizableLinear:
        return BYPASSED
    if kind.forward is not nn.Linear.forward:
        return f"{kind.__name__} has a forward of its own"
    return ""


def refuse_left_alone(
    left: Mapping[str, str], recipe: Recipe, rules: tuple[Rule, ...], sites: Mapping[str, Site]
) -> None:
    """RecipeError where a strict recipe and the rules want less than high precision of a module that is left alone."""
    for name, reason in left.items():
        if wants_less(name, recipe, rules, sites):
            remedy = "ask for that by a rule with format 'identity', or leave strict out"
            raise RecipeError(f"strict: {name} stays in high precision: {reason}; {remedy}")


def wants_less(name: str, recipe: Recipe, rules: tuple[Rule, ...], sites: Mapping[str, Site]) -> bool:
    """Whether the rules and the recipe want less than high precision of a linear of that name."""
    return is_quantized(ask_recipe(PlanRequest(recipe, rules, name, "linear", "cpu", torch.float32, site=sites[name])))


def is_quantized(slots: Mapping[str, Quantizer]) -> bool:
    """Whether any plane of a linear's operands is in less than high precision."""
    return {plane for kind in TENSOR_TYPES for plane in (slots[kind].rowwise, slots[kind].columnwise)} != {IDENTITY}
