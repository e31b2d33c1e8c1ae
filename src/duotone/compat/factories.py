"""Factories for `CustomRecipe(qfactory=...)`, named as in Transformer Engine; each also ships as a recipe, see RECIPES.

Each takes a role or None and returns a new quantizer or request. Inputs and weights whose backward uses another format
than forward encode the dequantized rowwise plane, so that backward differentiates what forward computed.
"""

from collections.abc import Callable
from functools import partial

from duotone.compat import quantizers
from duotone.recipes.delayed import DelayedScalingRequest
from duotone.recipes.roles import GRADIENTS, LINEAR, QuantizerRole

Answer = quantizers.QuantizerHandle | DelayedScalingRequest
Factory = Callable[[QuantizerRole | None], Answer]
Maker = Callable[[], Answer]
HandleMaker = Callable[[], quantizers.QuantizerHandle]


def _by_tensor_type(name: str, default: Maker, module_types: tuple[str, ...] = LINEAR, **makers: Maker) -> Factory:
    """The factory of that name. For a role of `module_types` it calls the maker for the tensor type, else `default`."""

    def factory(role: QuantizerRole | None) -> Answer:
        kind = role.tensor_type if role is not None and role.module_type in module_types else ""
        return makers.get(kind, default)()

    factory.__name__ = factory.__qualname__ = f"{name}_factory"
    return factory


def _hybrid(row: HandleMaker, col: HandleMaker, source: str = "rowwise_dequantized") -> HandleMaker:
    return lambda: quantizers.HybridQuantizer(
        rowwise_quantizer=row(), columnwise_quantizer=col(), columnwise_source=source
    )


HIGH, MXFP8, NVFP4 = quantizers.IdentityQuantizer, quantizers.MXFP8Quantizer, quantizers.NVFP4Quantizer
NVFP4_BY_ROW = partial(NVFP4, row_scaled_nvfp4=True)
NVFP4_HADAMARD = partial(NVFP4, with_rht=True)
NVFP4_GRADIENT = partial(NVFP4, with_rht=True, stochastic_rounding=True)
NVFP4_SQUARE = partial(NVFP4, with_2d_quantization=True)
BLOCKS, ROW_BLOCKS = quantizers.Float8BlockQuantizer, partial(quantizers.Float8BlockQuantizer, block_scaling_dim=1)

high_precision_factory = _by_tensor_type("high_precision", HIGH)
delayed_scaling_factory = _by_tensor_type("delayed_scaling", DelayedScalingRequest)
float8_block_scaling_factory = _by_tensor_type("float8_block_scaling", ROW_BLOCKS, weight=BLOCKS)
mxfp8_factory = _by_tensor_type("mxfp8", MXFP8)
nvfp4_factory = _by_tensor_type("nvfp4", NVFP4_HADAMARD, weight=NVFP4_SQUARE, grad_output=NVFP4_GRADIENT)
high_precision_fwd_mxfp8_bwd_factory = _by_tensor_type(
    "high_precision_fwd_mxfp8_bwd", _hybrid(HIGH, MXFP8, "original"), grad_output=MXFP8
)
mxfp8_fwd_nvfp4_bwd_factory = _by_tensor_type(
    "mxfp8_fwd_nvfp4_bwd",
    MXFP8,
    input=_hybrid(MXFP8, NVFP4_HADAMARD, "original"),
    weight=_hybrid(MXFP8, NVFP4),
    grad_output=NVFP4_GRADIENT,
)
nvfp4_1d_weight_factory = _by_tensor_type(
    "nvfp4_1d_weight", NVFP4_HADAMARD, weight=_hybrid(NVFP4, NVFP4), grad_output=NVFP4_GRADIENT
)
mxfp8_fwd_high_precision_bwd_factory = _by_tensor_type(
    "mxfp8_fwd_high_precision_bwd", MXFP8, input=_hybrid(MXFP8, HIGH), weight=_hybrid(MXFP8, HIGH), grad_output=HIGH
)
nvfp4_row_scaled_fwd_mxfp8_bwd_factory = _by_tensor_type(
    "nvfp4_row_scaled_fwd_mxfp8_bwd",
    MXFP8,
    module_types=("grouped_linear",),
    input=_hybrid(NVFP4_BY_ROW, MXFP8),
    weight=_hybrid(NVFP4, MXFP8),
)
nvfp4_row_scaled_fwd_high_precision_bwd_factory = _by_tensor_type(
    "nvfp4_row_scaled_fwd_high_precision_bwd",
    NVFP4,
    input=_hybrid(NVFP4_BY_ROW, HIGH),
    weight=_hybrid(NVFP4, HIGH),
    grad_output=HIGH,
)


def current_scaling_factory(role: QuantizerRole | None) -> Answer:
    """FP8 with one scale for each tensor. Gradients, also those of attention, are E5M2."""
    gradient = role is not None and role.tensor_type in GRADIENTS
    return quantizers.Float8CurrentScalingQuantizer("e5m2" if gradient else "e4m3")


def nvfp4_linear_fp8_dpa_factory(role: QuantizerRole | None) -> Answer:
    """NVFP4 linears and FP8 attention, whose softmax has a delayed scale of one step."""
    name, kind = ("", "") if role is None else (role.name, role.tensor_type)
    is_attention = role is not None and role.module_type == "dpa"
    if is_attention and kind in ("s", "dp"):
        return DelayedScalingRequest(amax_history_len=1, amax_compute_algo="most_recent")
    is_boundary = role is not None and not role.module_type and name.endswith((".dpa_output", ".dpa_grad_input"))
    if is_attention or is_boundary:
        is_gradient = name.endswith(".dpa_grad_input") or (is_attention and kind in GRADIENTS)
        return quantizers.Float8CurrentScalingQuantizer("e5m2" if is_gradient else "e4m3")
    return nvfp4_factory(role)


RECIPES: dict[str, Factory] = {
    "bf16": high_precision_factory,
    "fp8-delayed": delayed_scaling_factory,
    "fp8-current": current_scaling_factory,
    "fp8-block": float8_block_scaling_factory,
    "mxfp8": mxfp8_factory,
    "nvfp4": nvfp4_factory,
    "high-precision-fwd-mxfp8-bwd": high_precision_fwd_mxfp8_bwd_factory,
    "mxfp8-fwd-nvfp4-bwd": mxfp8_fwd_nvfp4_bwd_factory,
    "nvfp4-1d-weight": nvfp4_1d_weight_factory,
    "mxfp8-fwd-high-precision-bwd": mxfp8_fwd_high_precision_bwd_factory,
    "nvfp4-row-scaled-fwd-mxfp8-bwd": nvfp4_row_scaled_fwd_mxfp8_bwd_factory,
    "nvfp4-row-scaled-fwd-high-precision-bwd": nvfp4_row_scaled_fwd_high_precision_bwd_factory,
    "nvfp4-linear-fp8-dpa": nvfp4_linear_fp8_dpa_factory,
}
"""The factory by the name of the recipe that gives linears the same quantizers."""
