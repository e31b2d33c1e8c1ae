"""nn.Modules: names, parameters and tuples of the stages in `ops/`."""

from duotone.modules.layer_norm_linear import LayerNormLinear
from duotone.modules.layer_norm_mlp import LayerNormMLP
from duotone.modules.moe import MoE
from duotone.ops import GroupedLinear, LayerNorm, Linear, RMSNorm

__all__ = ["GroupedLinear", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "MoE", "RMSNorm"]
