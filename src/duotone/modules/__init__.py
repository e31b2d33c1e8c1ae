"""Modules: those that follow plans, fusible ops, and blocks of them that are one stage each."""

from duotone.modules import fused_cast  # noqa: F401 (adds its rewrite rules)  # pyright: ignore[reportUnusedImport]
from duotone.modules.grouped_linear import GroupedLinear
from duotone.modules.layer_norm import LayerNormLinear, LayerNormMLP
from duotone.modules.linear import Linear
from duotone.modules.moe import MoE
from duotone.modules.norm import LayerNorm, RMSNorm

__all__ = ["GroupedLinear", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "MoE", "RMSNorm"]
