"""Names of Transformer Engine: quantizer handles, factories for `CustomRecipe`, and `RecipeState`."""

from duotone import recipes
from duotone.compat import factories
from duotone.compat import old_paths as old_paths
from duotone.compat.quantizers import Float8BlockQuantizer as Float8BlockQuantizer
from duotone.compat.quantizers import Float8CurrentScalingQuantizer as Float8CurrentScalingQuantizer
from duotone.compat.quantizers import Float8Quantizer as Float8Quantizer
from duotone.compat.quantizers import HybridQuantizer as HybridQuantizer
from duotone.compat.quantizers import IdentityQuantizer as IdentityQuantizer
from duotone.compat.quantizers import MXFP8Quantizer as MXFP8Quantizer
from duotone.compat.quantizers import NVFP4Quantizer as NVFP4Quantizer
from duotone.compat.quantizers import QuantizerHandle as QuantizerHandle
from duotone.compat.recipe_state import RecipeState as RecipeState

recipes.zoo = factories  # type: ignore[attr-defined]  # the name under which users find the factories
