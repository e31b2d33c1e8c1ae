"""Names of Transformer Engine: quantizer handles, factories for `CustomRecipe`, and `RecipeState`."""

from duotone import recipes
from duotone.compat import extra_state, factories
from duotone.compat.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizerHandle,
)
from duotone.compat.recipe_state import RecipeState
from duotone.modules.foreign_states import READERS

__all__ = [
    "Float8BlockQuantizer", "Float8CurrentScalingQuantizer", "Float8Quantizer", "HybridQuantizer",
    "IdentityQuantizer", "MXFP8Quantizer", "NVFP4Quantizer", "QuantizerHandle", "RecipeState", "factories",
]  # fmt: skip

recipes.zoo = factories  # type: ignore[attr-defined]  # the name under which users find the factories
READERS.append(extra_state.unpack)
