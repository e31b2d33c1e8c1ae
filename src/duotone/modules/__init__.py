"""nn.Modules: names, parameters and tuples of the stages in `ops/`."""

from duotone.modules.conversion import convert_parameters as convert_parameters
from duotone.modules.layer_norm_linear import LayerNormLinear as LayerNormLinear
from duotone.modules.layer_norm_mlp import LayerNormMLP as LayerNormMLP
from duotone.modules.moe import MoE as MoE
from duotone.ops.grouped import GroupedLinear as GroupedLinear
from duotone.ops.linear import Linear as Linear
from duotone.ops.naming import name_modules as name_modules
from duotone.ops.norm import LayerNorm as LayerNorm
from duotone.ops.norm import RMSNorm as RMSNorm
