"""Duotone: low-precision training for PyTorch. Each direction of each tensor has its own format."""

import importlib

from duotone import formats, observe, ops, optim, recipes
from duotone.attention import (
    DotProductAttention,
    KVCache,
    MultiheadAttention,
    RotaryPositionEmbedding,
    TransformerLayer,
)
from duotone.compat import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizerHandle,
    RecipeState,
)
from duotone.conversion import Plan, PlanDiff, PlanRow, assign_names, convert, convert_parameters, fuse, plan, revert
from duotone.errors import MissingPlaneError, RecipeError, UserError
from duotone.modules import GroupedLinear, LayerNorm, LayerNormLinear, LayerNormMLP, Linear, MoE, RMSNorm
from duotone.modules.delayed_checkpoint import load_recipe_state, recipe_state
from duotone.modules.sent_weights import gather_quantized
from duotone.pipeline.offload import offload_activations
from duotone.recipes import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    HighPrecision,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizerRole,
    Recipe,
    RuleRecipe,
    Schedule,
)
from duotone.serving import export, load
from duotone.state import autocast, load_rng_state, quantized_model_init, rng_state
from duotone.tensor import QuantizeContext, QuantizedTensor, Quantizer

__version__ = "0.2.0"
__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "DelayedScalingRequest",
    "DotProductAttention",
    "Float8BlockQuantizer",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8RowwiseScaling",
    "GroupedLinear",
    "HighPrecision",
    "HybridQuantizer",
    "IdentityQuantizer",
    "KVCache",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MXFP8BlockScaling",
    "MXFP8Quantizer",
    "MissingPlaneError",
    "MoE",
    "MultiheadAttention",
    "NVFP4BlockScaling",
    "NVFP4Quantizer",
    "Plan", "PlanDiff", "PlanRow",
    "QuantizeContext",
    "QuantizedTensor",
    "Quantizer",
    "QuantizerHandle",
    "QuantizerRole",
    "RMSNorm",
    "Recipe",
    "RecipeError",
    "RecipeState",
    "RotaryPositionEmbedding",
    "RuleRecipe",
    "Schedule",
    "TransformerLayer",
    "UserError",
    "assign_names",
    "autocast",
    "convert",
    "convert_parameters",
    "export",
    "formats",
    "fuse",
    "gather_quantized",
    "load",
    "load_recipe_state",
    "load_rng_state",
    "observe",
    "offload_activations",
    "ops",
    "optim",
    "plan",
    "quantized_model_init",
    "recipe_state",
    "recipes",
    "revert",
    "rng_state",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Import the two packages that need other libraries when they are first read."""
    if name in ("distributed", "integrations"):
        return importlib.import_module(f"duotone.{name}")
    raise AttributeError(f"module 'duotone' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
