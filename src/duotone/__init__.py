"""Duotone: low-precision training for PyTorch in which each direction of each tensor has a format of its own."""

from duotone import formats as formats
from duotone import observe as observe
from duotone import ops as ops
from duotone import optim as optim
from duotone import recipes as recipes
from duotone.attention import DotProductAttention as DotProductAttention
from duotone.attention import MultiheadAttention as MultiheadAttention
from duotone.attention import RotaryPositionEmbedding as RotaryPositionEmbedding
from duotone.attention import TransformerLayer as TransformerLayer
from duotone.compat import Float8BlockQuantizer as Float8BlockQuantizer
from duotone.compat import Float8CurrentScalingQuantizer as Float8CurrentScalingQuantizer
from duotone.compat import Float8Quantizer as Float8Quantizer
from duotone.compat import HybridQuantizer as HybridQuantizer
from duotone.compat import IdentityQuantizer as IdentityQuantizer
from duotone.compat import MXFP8Quantizer as MXFP8Quantizer
from duotone.compat import NVFP4Quantizer as NVFP4Quantizer
from duotone.compat import QuantizerHandle as QuantizerHandle
from duotone.compat import RecipeState as RecipeState
from duotone.conversion import PlanRow as PlanRow
from duotone.conversion import convert as convert
from duotone.conversion import convert_parameters as convert_parameters
from duotone.conversion import name_modules as name_modules
from duotone.conversion import plan as plan
from duotone.conversion import revert as revert
from duotone.errors import RecipeError as RecipeError
from duotone.errors import UsageError as UsageError
from duotone.errors import UserError as UserError
from duotone.modules import GroupedLinear as GroupedLinear
from duotone.modules import LayerNorm as LayerNorm
from duotone.modules import LayerNormLinear as LayerNormLinear
from duotone.modules import LayerNormMLP as LayerNormMLP
from duotone.modules import Linear as Linear
from duotone.modules import MoE as MoE
from duotone.modules import RMSNorm as RMSNorm
from duotone.planned.delayed_states import load_recipe_state as load_recipe_state
from duotone.planned.delayed_states import recipe_state as recipe_state
from duotone.recipes import CustomRecipe as CustomRecipe
from duotone.recipes import QuantizerRole as QuantizerRole
from duotone.state import autocast as autocast
from duotone.state import load_rng_state as load_rng_state
from duotone.state import quantized_model_init as quantized_model_init
from duotone.state import rng_state as rng_state
from duotone.tensor import QuantizedTensor as QuantizedTensor
from duotone.tensor import Quantizer as Quantizer

__version__ = "0.1.0"
