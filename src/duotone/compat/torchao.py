"""`convert_to_float8_training` of torchao, whose configs become recipes. torchao need not be installed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from glob import escape
from typing import Any

import torch
from torch import nn

from duotone import formats
from duotone.compat.quantizers import fp8_element
from duotone.conversion.converting import convert_by
from duotone.conversion.naming import require_model, sites_of
from duotone.conversion.skipped import skipped_modules
from duotone.conversion.targets import targets
from duotone.errors import UserError
from duotone.modules.planned import Planned
from duotone.recipes import Rule, RuleRecipe

__all__ = [
    "CastConfig", "Float8GemmConfig", "Float8LinearConfig", "Float8LinearRecipeName", "ScalingGranularity",
    "ScalingType", "convert_to_float8_training", "recipe_from",
]  # fmt: skip

FLOOR = 1e-12
"""The least amax that counts in torchao; a smaller one counts as this."""


class ScalingType(Enum):
    """Whether a tensor is cast."""

    DYNAMIC = "dynamic"
    DISABLED = "disabled"


class ScalingGranularity(Enum):
    """Which elements share a scale: those of a tensor, or of a row of an operand."""

    TENSORWISE = "tensorwise"
    AXISWISE = "axiswise"


class Float8LinearRecipeName(Enum):
    """Names of `Float8LinearConfig.from_recipe_name`."""

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"


@dataclass(frozen=True)
class CastConfig:
    """How a tensor is cast. The dtype None is E4M3, and E5M2 for gradients."""

    scaling_type: ScalingType = ScalingType.DYNAMIC
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE
    target_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Float8GemmConfig:
    """How a product accumulates."""

    use_fast_accum: bool = False


@dataclass(frozen=True)
class Float8LinearConfig:
    """How a linear is cast. If the cast for the second product of a tensor is None, that of the first holds."""

    cast_config_input: CastConfig = CastConfig()
    cast_config_input_for_grad_weight: CastConfig | None = None
    cast_config_weight: CastConfig = CastConfig()
    cast_config_weight_for_grad_input: CastConfig | None = None
    cast_config_grad_output: CastConfig = CastConfig()
    cast_config_grad_output_for_grad_weight: CastConfig | None = None
    gemm_config_output: Float8GemmConfig = Float8GemmConfig(use_fast_accum=True)
    gemm_config_grad_input: Float8GemmConfig = Float8GemmConfig()
    gemm_config_grad_weight: Float8GemmConfig = Float8GemmConfig()
    enable_fsdp_float8_all_gather: bool = False
    pad_inner_dim: bool = False
    emulate: bool = False
    force_recompute_fp8_weight_in_bwd: bool = False
    round_scales_to_power_of_2: bool = False

    @staticmethod
    def from_recipe_name(recipe_name: Float8LinearRecipeName | str) -> "Float8LinearConfig":
        """The config of that name. UserError for another name."""
        try:
            name = Float8LinearRecipeName(getattr(recipe_name, "value", recipe_name))
        except ValueError:
            allowed = ", ".join(repr(each.value) for each in Float8LinearRecipeName)
            raise UserError(f"recipe_name {recipe_name!r} is unknown; allowed are {allowed}") from None
        if name is Float8LinearRecipeName.TENSORWISE:
            return Float8LinearConfig()
        rows = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=torch.float8_e4m3fn)
        rowwise = Float8LinearConfig(
            cast_config_input=rows,
            cast_config_weight=rows,
            cast_config_grad_output=rows,
            round_scales_to_power_of_2=True,
        )
        if name is Float8LinearRecipeName.ROWWISE:
            return rowwise
        plain = CastConfig(scaling_type=ScalingType.DISABLED)
        return replace(
            rowwise,
            cast_config_input_for_grad_weight=plain,
            cast_config_weight_for_grad_input=CastConfig(),
            cast_config_grad_output_for_grad_weight=plain,
        )


TENSORS = {
    "input": ("cast_config_input", "cast_config_input_for_grad_weight", "e4m3"),
    "weight": ("cast_config_weight", "cast_config_weight_for_grad_input", "e4m3"),
    "grad_output": ("cast_config_grad_output", "cast_config_grad_output_for_grad_weight", "e5m2"),
}
"""The fields of the casts to the rowwise and the columnwise plane, and the element where none is named."""

GRANULARITIES = {"tensorwise": "tensor", "axiswise": "row"}


def recipe_from(config: Any) -> RuleRecipe:
    """The recipe of a config of torchao, one of this module, or the name of one. UserError if it has no counterpart."""
    if isinstance(config, str | Enum):
        config = Float8LinearConfig.from_recipe_name(str(getattr(config, "value", config)))
    absent = next((name for name in Float8LinearConfig.__dataclass_fields__ if not hasattr(config, name)), None)
    if absent is not None:
        raise UserError(f"config is {config!r}, without {absent}; give a Float8LinearConfig or the name of one")
    if config.enable_fsdp_float8_all_gather:
        raise UserError(
            "enable_fsdp_float8_all_gather is no part of a recipe; leave it out, and call "
            "duotone.gather_quantized(model) after the conversion"
        )
    rules = []
    for tensor, (first, second, element) in TENSORS.items():
        casts = getattr(config, first), getattr(config, second) or getattr(config, first)
        row, col = (_format(cast, element, config.round_scales_to_power_of_2) for cast in casts)
        rules.append(Rule(tensor_type=tensor, module_type="linear", rowwise=row, columnwise=col))
    return RuleRecipe(
        rules=tuple(rules),
        title="torchao",
        fprop_fast_accum=config.gemm_config_output.use_fast_accum,
        dgrad_fast_accum=config.gemm_config_grad_input.use_fast_accum,
        wgrad_fast_accum=config.gemm_config_grad_weight.use_fast_accum,
    )


def convert_to_float8_training(
    module: nn.Module,
    *,
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
    config: Any = None,
) -> nn.Module:
    """Convert in place the linears for which `module_filter_fn(linear, full name)` is true; without it, all linears.

    `config` is a config of torchao or of this module, or a name of `from_recipe_name`; None is "tensorwise". Other
    modules stay as they are, those of earlier calls too. UserError if the config has no counterpart.
    """
    require_model("convert_to_float8_training", module)
    if module_filter_fn is not None and not callable(module_filter_fn):
        raise UserError(f"module_filter_fn is {module_filter_fn!r}; give a function of a linear and its full name")
    recipe = recipe_from(config or Float8LinearConfig())
    excluded = {
        target.name: target.module
        for target in targets(module, skipped_modules(module), sites_of(module))
        if not isinstance(target.module, nn.Linear)
        or not (module_filter_fn is None or module_filter_fn(target.module, target.name))
    }
    earlier = [(each, each.recipe, each.rules) for each in excluded.values() if isinstance(each, Planned)]
    rules = tuple(Rule(module=escape(name), format=formats.IDENTITY.name) for name in sorted(excluded))
    convert_by(module, recipe, rules)  # torchao converts output heads too, so the default rules do not apply
    for each, before, rules_before in earlier:
        each.adopt(before, rules_before, each.module_name, each.site)
    return module


def _format(cast: Any, element: str, power_of_two: bool) -> str:
    if cast.scaling_type.value == ScalingType.DISABLED.value:
        return formats.IDENTITY.name
    element = element if cast.target_dtype is None else fp8_element(cast.target_dtype)
    stem = f"fp8_{element}_{GRANULARITIES[cast.scaling_granularity.value]}"
    return formats.with_floor(stem + "_pow2" * power_of_two, FLOOR)
