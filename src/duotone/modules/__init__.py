"""nn.Modules: names, parameters and tuples of the stages in `ops/`."""

from duotone.modules.layer_norm import LayerNormLinear, LayerNormMLP
from duotone.modules.moe import MoE
from duotone.ops import GroupedLinear, LayerNorm, Linear, RMSNorm

__all__ = ["GroupedLinear", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "MoE", "RMSNorm"]
