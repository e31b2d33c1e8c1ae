"""Modules that are built from the stages and ops of `ops/`: they have names and parameters."""

from duotone.modules.layer_norm import LayerNormLinear, LayerNormMLP
from duotone.modules.moe import MoE
from duotone.ops import GroupedLinear, LayerNorm, Linear, RMSNorm

__all__ = ["GroupedLinear", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "MoE", "RMSNorm"]
