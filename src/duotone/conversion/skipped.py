"""The modules that convert does not change although they may multiply by a matrix, and the reasons."""

import dis
import functools
from collections.abc import Iterator, Mapping
from types import CodeType

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from duotone.conversion import experts, forwards
from duotone.conversion.attributes import code_of_class
from duotone.conversion.default_rules import Reason, Why, heads
from duotone.conversion.naming import named_modules
from duotone.conversion.transposed import is_transposed
from duotone.errors import RecipeError
from duotone.formats import IDENTITY
from duotone.linear.plan import PlanRequest, ask_recipe
from duotone.modules.planned import Planned
from duotone.recipes.recipe import Recipe
from duotone.recipes.roles import TENSOR_TYPES, Site
from duotone.recipes.rules import Rule
from duotone.tensor import Quantizer

NO_GEMM = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, ParametrizationList)
"""Modules without a GEMM: they look up rows, multiply element by element, or share the matrix of another module."""

LOADS = ("LOAD_ATTR", "LOAD_METHOD")
DESCRIPTIONS = frozenset({"shape", "dtype", "device", "ndim", "size", "dim", "numel", "requires_grad", "is_cuda"})
"""Attributes of a tensor that code reads without its values."""
FIELDS = ("weight", "bias", "in_features", "out_features")
FILLING = ("init", "reset")
"""Parts of the names of methods that fill parameters."""

Reasons = dict[str, Why]
"""Reasons by the full name of a module."""


def skipped_modules(model: nn.Module) -> Reasons:
    """The modules that convert does not change although they may multiply by a matrix."""
    reasons: dict[str, Why | None] = {name: reason_skipped(module) for name, module in named_modules(model)}
    modules = dict(named_modules(model))
    tied = {name: Why(Reason.TIED_EMBEDDING) for name in heads(model) if isinstance(modules[name], nn.Embedding)}
    return {name: why for name, why in (reasons | bypassed(model) | tied).items() if why is not None}


def reason_skipped(module: nn.Module) -> Why | None:
    """Why convert leaves a module with matrices as it is. None if convert changes it, or if it has no matrix."""
    if isinstance(module, (Planned, *NO_GEMM)) or issubclass(type(module), experts.PlannedExperts):
        return None
    if hasattr(module, "stays_in_high_precision"):
        return None
    if isinstance(module, nn.Linear):
        return _reason_of_linear(module)
    if is_transposed(module):
        return _replaced(module) if forwards.is_replaced(module) else None
    parameters = module.named_parameters(recurse=False)
    matrices = [f"{name} {tuple(w.shape)}" for name, w in parameters if not is_lazy(w) and w.dim() > 1]
    if not matrices:
        return None
    contents = f"{type(module).__name__} holds {' and '.join(matrices)}"
    if not experts.holds_experts(module):
        return Why(Reason.MATRICES, contents)
    if forwards.is_replaced(module):
        return _replaced(module)._replace(matrices=contents)
    reason = experts.reason_skipped(module)
    return Why(Reason.EXPERTS, reason, contents) if reason else None


def _reason_of_linear(module: nn.Linear) -> Why | None:
    kind = type(module)
    if forwards.is_replaced(module):
        return _replaced(module)
    if kind is nn.Linear:
        return None
    if isinstance(module, LazyModuleMixin):
        return Why(Reason.LAZY)
    if kind is nn.modules.linear.NonDynamicallyQuantizableLinear:
        return Why(Reason.BYPASSED)
    return Why(Reason.OTHER_FORWARD, kind.__name__) if kind.forward is not nn.Linear.forward else None


def _replaced(module: nn.Module) -> Why:
    return Why(Reason.REPLACED, forwards.replacement(module))


def bypassed(model: nn.Module) -> Reasons:
    """Linears that never run, because their owner passes their weight to a function, as nn.MultiheadAttention does."""
    reasons: Reasons = {}
    for name, module in named_modules(model):
        for child in bypassed_children(type(module)):
            linear = module._modules.get(child)
            if isinstance(linear, nn.Linear) and not isinstance(linear, Planned):
                reasons[f"{name}.{child}" if name else child] = Why(Reason.BYPASSED)
    return reasons


@functools.cache
def bypassed_children(kind: type[nn.Module]) -> frozenset[str]:
    """The attributes whose weight some code of a class reads, and which none of its code calls or passes on.

    Code that only fills parameters does not count as reading.
    """
    code = list(code_of_class(kind))
    computing = [part for name, part in code if not any(word in name for word in FILLING)]
    reading = [part for part in computing if "weight" in part.co_names]
    loads = [load for part in reading for load in _loads(part)]
    read = {name for name, field, more in loads if field == "weight" and more not in DESCRIPTIONS}
    return frozenset(
        read and read - {name for _, part in code for name, field, _ in _loads(part) if field not in FIELDS}
    )


def _loads(code: CodeType) -> Iterator[tuple[str, str, str]]:
    """Each attribute that code loads, with the next two attributes of the same chain (`a.b.c`); "" for none."""
    chain: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in LOADS:
            chain.append(instruction.argval)
        elif instruction.opname != "EXTENDED_ARG":
            yield from zip(chain, [*chain[1:], ""], [*chain[2:], "", ""], strict=False)
            chain = []


def refuse_skipped(skipped: Reasons, recipe: Recipe, rules: tuple[Rule, ...], sites: Mapping[str, Site]) -> None:
    """RecipeError if a strict recipe and the rules give a format to a module that is not converted."""
    for name, why in skipped.items():
        if wants_less(name, recipe, rules, sites):
            remedy = "ask for that by a rule with format 'identity', or leave strict out"
            raise RecipeError(f"strict: {name} stays in high precision: {why.text}; {remedy}")


def wants_less(name: str, recipe: Recipe, rules: tuple[Rule, ...], sites: Mapping[str, Site]) -> bool:
    """Whether the rules and the recipe want low precision for a linear of that name."""
    return is_quantized(ask_recipe(PlanRequest(recipe, rules, name, "linear", "cpu", torch.float32, site=sites[name])))


def is_quantized(slots: Mapping[str, Quantizer]) -> bool:
    """Whether any plane of a linear's operands is in low precision."""
    return {plane for kind in TENSOR_TYPES for plane in (slots[kind].rowwise, slots[kind].columnwise)} != {IDENTITY}
