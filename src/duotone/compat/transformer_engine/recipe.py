"""Recipes of Duotone with the arguments, defaults and numerics of Transformer Engine."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

from duotone import recipes
from duotone.compat.transformer_engine.environment import defaults
from duotone.compat.transformer_engine.options import Options, by_name
from duotone.errors import RecipeError


@dataclass(frozen=True)
class MMParams:
    """How a product accumulates."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """How a tensor is scaled."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


NUMERICS: Options = {"propagate_nonfinite": False}
"""Fields whose default in Duotone gives other numerics than Transformer Engine."""

GEMMS = ("fprop", "dgrad", "wgrad")
UNUSED = {
    "interval": 1,
    "margin": 0,
    "fp8_format": "E4M3",
    "fp4_format": "E2M1",
    "override_linear_precision": (False, False, False),
    "x_block_scaling_dim": 1,
    "w_block_scaling_dim": 2,
    "grad_block_scaling_dim": 1,
}
"""Fields that Duotone's recipes do not have, with the only values that are allowed."""

IGNORED = ("params_dtype", "device")
"""Fields that Megatron also passes. Transformer Engine ignores them too."""

TRANSLATED: dict[str, tuple[str, Callable[..., object]]] = {
    "use_power_2_scales": ("power_of_two_scales", bool),
    "use_f32_scales": ("power_of_two_scales", operator.not_),
    **{f"fp8_gemm_{gemm}": (f"{gemm}_fast_accum", lambda how: not how.use_split_accumulator) for gemm in GEMMS},
}
"""Fields with another name and value in Duotone."""

TENSORS = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")


def translated(title: str, options: Options, names: Sequence[str]) -> Options:
    """The fields of Duotone's recipe. RecipeError for options without a field."""
    result: Options = {}
    tensors = {options.pop(name) for name in TENSORS if name in options}
    if len(tensors) > 1:
        raise RecipeError(f"{title} scales all tensors alike; give the same QParams, or write a RuleRecipe")
    for params in tensors:
        result |= {"power_of_two_scales": params.power_2_scale, "amax_epsilon": params.amax_epsilon}
    for name, value in options.items():
        if name in TRANSLATED:
            field, translate = TRANSLATED[name]
            result[field] = translate(value)
        elif name in names:
            result[name] = value
        elif name not in UNUSED and name not in IGNORED:
            raise RecipeError(f"{title} has no {name}; allowed are {', '.join(names)}")
        elif value != UNUSED.get(name, value):
            raise RecipeError(f"{title}({name}={value!r}) has no counterpart; write a RuleRecipe with those formats")
    return result


def _asks(kind: type[recipes.Recipe]) -> "classmethod[TheirRecipe, [], bool]":
    return classmethod(lambda cls: issubclass(cls, kind))


class TheirRecipe:
    """Mixed in before a recipe of Duotone: takes Transformer Engine's arguments, and has its methods for the kind.

    Environment variables give defaults, as they do there: an argument goes before its variable.
    """

    order: ClassVar[str]
    numerics: ClassVar[Options] = {}
    """Further fields that give Transformer Engine's numerics, besides NUMERICS."""

    def __init__(self, *values: object, **options: object) -> None:
        title = type(self).__name__
        names = tuple(field.name for field in fields(self))  # type: ignore[arg-type]
        order = self.order.split()
        from_environment, named = defaults({*names, *order}), by_name(title, order, values, options)
        numbers = translated(title, from_environment, names) | translated(title, named, names)
        super().__init__(**NUMERICS | self.numerics | numbers)

    delayed = _asks(recipes.DelayedScaling)
    float8_current_scaling = _asks(recipes.Float8CurrentScaling)
    float8_block_scaling = _asks(recipes.Float8BlockScaling)
    mxfp8 = _asks(recipes.MXFP8BlockScaling)
    nvfp4 = _asks(recipes.NVFP4BlockScaling)
    custom = _asks(recipes.CustomRecipe)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Whether a tensor has one scale: delayed or current scaling."""
        return cls.delayed() or cls.float8_current_scaling()


class DelayedScaling(TheirRecipe, recipes.DelayedScaling):
    """FP8 with scales that follow from earlier steps. The first scale is 1, and every amax counts unchanged."""

    order = (
        "margin fp8_format amax_history_len amax_compute_algo scaling_factor_compute_algo reduce_amax fp8_dpa fp8_mha"
    )
    numerics: ClassVar[Options] = {"first_scale_from_amax": False, "skip_nonfinite_amax": False, "spike_factor": 0.0}


@dataclass(frozen=True, kw_only=True, repr=False)
class DelayedScalingRequest(recipes.DelayedScalingRequest):
    """What a factory returns for delayed scaling with the numerics of `DelayedScaling` above: the first scale is 1."""

    skip_nonfinite_amax: bool = False
    spike_factor: float = 0.0
    first_scale_from_amax: bool = False


class Float8CurrentScaling(TheirRecipe, recipes.Float8CurrentScaling):
    """FP8 with one scale for each tensor."""

    order = "use_power_2_scales fp8_format"


class Float8BlockScaling(TheirRecipe, recipes.Float8BlockScaling):
    """FP8 with scales of blocks. Products never accumulate fast."""

    order = "use_f32_scales fp8_format"
    numerics: ClassVar[Options] = {"fprop_fast_accum": False}


class MXFP8BlockScaling(TheirRecipe, recipes.MXFP8BlockScaling):
    """MXFP8."""

    order = "margin fp8_format fp8_dpa fp8_mha"


class NVFP4BlockScaling(TheirRecipe, recipes.NVFP4BlockScaling):
    """NVFP4."""

    order = "disable_rht disable_stochastic_rounding disable_2d_quantization"


class CustomRecipe(TheirRecipe, recipes.CustomRecipe):
    """Formats from a function of the role."""

    order = "qfactory fp8_dpa fp8_mha"
