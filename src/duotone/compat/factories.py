"""Factories for `CustomRecipe(qfactory=...)`, named as in Transformer Engine; each also ships as a recipe, see RECIPES.

Each takes a role or None and returns a new quantizer or request. Inputs and weights whose backward uses another format
than forward encode the dequantized rowwise plane, so that backward differentiates what forward computed.
"""

from collections.abc import Callable

from duotone import formats
from duotone.compat.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizerHandle,
)
from duotone.recipes.delayed import DelayedScalingRequest
from duotone.recipes.roles import GRADIENTS, LINEAR, QuantizerRole
from duotone.tensor.quantizer import Quantizer

Answer = QuantizerHandle | DelayedScalingRequest
"""What a factory gives a role."""

FOLLOWING = "rowwise_dequantized"


def _kind(role: QuantizerRole | None, module_types: tuple[str, ...] = LINEAR) -> str:
    """The tensor type of a role of those modules, else ""."""
    return role.tensor_type if role is not None and role.module_type in module_types else ""


def _hybrid(row: QuantizerHandle, col: QuantizerHandle, source: str = "original") -> HybridQuantizer:
    return HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=col, columnwise_source=source)


def _row_scaled() -> QuantizerHandle:
    fmt = formats.get("nvfp4_row")
    return QuantizerHandle(Quantizer(fmt, fmt))


def high_precision_factory(role: QuantizerRole | None) -> Answer:
    return IdentityQuantizer()


def delayed_scaling_factory(role: QuantizerRole | None) -> Answer:
    return DelayedScalingRequest()


def current_scaling_factory(role: QuantizerRole | None) -> Answer:
    gradient = role is not None and role.tensor_type in GRADIENTS
    return Float8CurrentScalingQuantizer("e5m2" if gradient else "e4m3")


def float8_block_scaling_factory(role: QuantizerRole | None) -> Answer:
    return Float8BlockQuantizer(block_scaling_dim=2 if _kind(role) == "weight" else 1)


def mxfp8_factory(role: QuantizerRole | None) -> Answer:
    return MXFP8Quantizer()


def nvfp4_factory(role: QuantizerRole | None) -> QuantizerHandle:
    """2-D scales for weights; the Hadamard transform for all else, and stochastic rounding for gradients."""
    kind = _kind(role)
    if kind == "weight":
        return NVFP4Quantizer(with_2d_quantization=True)
    return NVFP4Quantizer(with_rht=True, stochastic_rounding=kind == "grad_output")


def high_precision_fwd_mxfp8_bwd_factory(role: QuantizerRole | None) -> Answer:
    if _kind(role) == "grad_output":
        return MXFP8Quantizer()
    return _hybrid(IdentityQuantizer(), MXFP8Quantizer())


def mxfp8_fwd_nvfp4_bwd_factory(role: QuantizerRole | None) -> Answer:
    kind = _kind(role)
    if kind == "input":
        return _hybrid(MXFP8Quantizer(), NVFP4Quantizer(with_rht=True))
    if kind == "weight":
        return _hybrid(MXFP8Quantizer(), NVFP4Quantizer(), FOLLOWING)
    return nvfp4_factory(role) if kind == "grad_output" else MXFP8Quantizer()


def nvfp4_1d_weight_factory(role: QuantizerRole | None) -> Answer:
    """NVFP4 whose weights have 1-D scales in both directions."""
    if _kind(role) == "weight":
        return _hybrid(NVFP4Quantizer(), NVFP4Quantizer(), FOLLOWING)
    return nvfp4_factory(role)


def mxfp8_fwd_high_precision_bwd_factory(role: QuantizerRole | None) -> Answer:
    """The same bits as MXFP8 with backward_override="dequantized"."""
    kind = _kind(role)
    if kind in ("input", "weight"):
        return _hybrid(MXFP8Quantizer(), IdentityQuantizer(), FOLLOWING)
    return IdentityQuantizer() if kind == "grad_output" else MXFP8Quantizer()


def nvfp4_row_scaled_fwd_mxfp8_bwd_factory(role: QuantizerRole | None) -> Answer:
    """Row-scaled NVFP4 in the forward of grouped linears, MXFP8 everywhere else."""
    kind = _kind(role, ("grouped_linear",))
    if kind == "input":
        return _hybrid(_row_scaled(), MXFP8Quantizer(), FOLLOWING)
    return _hybrid(NVFP4Quantizer(), MXFP8Quantizer(), FOLLOWING) if kind == "weight" else MXFP8Quantizer()


def nvfp4_row_scaled_fwd_high_precision_bwd_factory(role: QuantizerRole | None) -> Answer:
    kind = _kind(role)
    if kind == "input":
        return _hybrid(_row_scaled(), IdentityQuantizer(), FOLLOWING)
    if kind == "weight":
        return _hybrid(NVFP4Quantizer(), IdentityQuantizer(), FOLLOWING)
    return IdentityQuantizer() if kind == "grad_output" else NVFP4Quantizer()


def nvfp4_linear_fp8_dpa_factory(role: QuantizerRole | None) -> Answer:
    """NVFP4 linears; attention in FP8, its softmax with a delayed scale of one step."""
    kind = _kind(role, ("dpa",))
    hint = role is not None and not role.module_type and role.name.endswith((".dpa_output", ".dpa_grad_input"))
    if kind in ("s", "dp"):
        return DelayedScalingRequest(amax_history_len=1, amax_compute_algo="most_recent")
    if role is not None and (hint or role.module_type == "dpa"):
        gradient = kind in GRADIENTS or role.name.endswith(".dpa_grad_input")
        return Float8CurrentScalingQuantizer("e5m2" if gradient else "e4m3")
    return nvfp4_factory(role)


RECIPES: dict[str, Callable[[QuantizerRole | None], Answer]] = {
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
