"""nn.Modules: names, parameters and tuples of the stages in `ops/`."""

from duotone.modules.layer_norm_linear import LayerNormLinear as LayerNormLinear
from duotone.modules.layer_norm_mlp import LayerNormMLP as LayerNormMLP
from duotone.modules.moe import MoE as MoE
from duotone.ops import GroupedLinear as GroupedLinear
from duotone.ops import LayerNorm as LayerNorm
from duotone.ops import Linear as Linear
from duotone.ops import RMSNorm as RMSNorm
