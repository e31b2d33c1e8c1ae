"""Transformer Engine's environment variables that change numbers: defaults of recipes, and those that are refused."""

import os
from collections.abc import Container, Mapping

from duotone.compat.transformer_engine.options import Options
from duotone.errors import RecipeError

FLAG: Mapping[str, object] = {"0": False, "1": True}
SCOPE: Mapping[str, object] = {name: name for name in ("none", "weights", "activations", "all")}
NVFP4_FLAGS = "disable_rht disable_stochastic_rounding disable_2d_quantization row_scaled_activation"
FIELDS = {
    "NVTE_BACKWARD_OVERRIDE": ("backward_override", {name: name for name in ("high_precision", "dequantized")}),
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": ("use_power_2_scales", FLAG),
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": ("use_f32_scales", FLAG),
    **{f"NVTE_NVFP4_{field.upper()}": (field, FLAG) for field in NVFP4_FLAGS.split()},
    **{f"NVTE_{field.upper()}": (field, SCOPE) for field in ("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256")},
    "NVTE_NVFP4_4OVER6_ERR_MODE": (
        "nvfp4_4over6_err_mode",
        {name: name.upper() for name in ("MAE", "MSE", "mae", "mse")},
    ),
}
"""The field whose default each variable gives, and the value of the field for each text."""

REFUSED = {
    **dict.fromkeys(("NVTE_FP8_DPA_BWD", "NVTE_DPA_FP8CS_O_in_F16"), "1"),
    **dict.fromkeys(("NVTE_APPLY_QK_LAYER_SCALING", "NVTE_USE_FAST_MATH", "NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH"), "0"),
    **dict.fromkeys(("NVTE_ZERO_CENTERED_GAMMA_IN_WTYPE", "NVTE_CUDNN_MXFP8_NORM_OUTPUT_IN_INPUT_DTYPE"), "0"),
    "NVTE_DPA_FP8_RECIPE": "",
}
"""Variables without a counterpart, and the only value of each that changes nothing. Those that only matter beside
`NVTE_DPA_FP8_RECIPE` are not listed."""


def refuse_variables() -> None:
    """Raise RecipeError for a variable of `REFUSED` that would change numbers in Transformer Engine."""
    for name, harmless in REFUSED.items():
        if (value := os.environ.get(name, harmless)) != harmless:
            raise RecipeError(
                f"{name} is {value!r}, which Duotone has no counterpart of; unset it, or set {harmless!r}"
            )


def defaults(fields: Container[str]) -> Options:
    """Return the values that variables give to these fields of a recipe, when it is made.

    Raises RecipeError for a value that Transformer Engine does not know, and for a variable of `REFUSED`.
    """
    refuse_variables()
    result: Options = {}
    for name, (field, values) in FIELDS.items():
        if field in fields and (text := os.environ.get(name)) is not None:
            if text not in values:
                raise RecipeError(
                    f"{name} is {text!r}; allowed are {', '.join(map(repr, values))}: set one, or unset it"
                )
            result[field] = values[text]
    return result
