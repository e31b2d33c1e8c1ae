"""Recipes of Duotone with the arguments, defaults and numerics of Transformer Engine."""

from dataclasses import dataclass
from typing import Any, ClassVar

from duotone import recipes
from duotone.compat.transformer_engine.options import Options, by_name
from duotone.errors import RecipeError
from duotone.recipes.recipe import RecipeClass


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
"""What Duotone does otherwise unless told."""

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
"""Fields that recipes here do not have, with the only values that they may have."""

PRODUCTS = {f"fp8_gemm_{gemm}": f"{gemm}_fast_accum" for gemm in ("fprop", "dgrad", "wgrad")}
TENSORS = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")


def translated(title: str, options: Options, known: tuple[str, ...]) -> Options:
    """The fields of a recipe here. RecipeError for what it has no field for."""
    result: Options = {}
    tensors = {options.pop(name) for name in TENSORS if name in options}
    if len(tensors) > 1:
        raise RecipeError(f"{title} scales all tensors alike; give the same QParams, or write a RuleRecipe")
    for params in tensors:
        result |= {"power_of_two_scales": params.power_2_scale, "amax_epsilon": params.amax_epsilon}
    for name, value in options.items():
        if name in PRODUCTS:
            result[PRODUCTS[name]] = not value.use_split_accumulator
        elif name == "use_power_2_scales":
            result["power_of_two_scales"] = value
        elif name == "use_f32_scales":
            result["power_of_two_scales"] = not value
        elif name in known or name not in UNUSED:
            result[name] = value
        elif value != UNUSED[name]:
            raise RecipeError(f"{title}({name}={value!r}) has no counterpart; write a RuleRecipe with those formats")
    return result


class TheirRecipe(RecipeClass):
    """Makes recipes from arguments of Transformer Engine."""

    def __call__(cls, *values: Any, **options: Any) -> Any:
        named = by_name(cls.__name__, vars(cls)["order"].split(), values, options)
        known = tuple(vars(cls)["__dataclass_fields__"])
        return super().__call__(**NUMERICS | vars(cls)["numerics"] | translated(cls.__name__, named, known))


def _asks(kind: type[recipes.Recipe]) -> Any:
    return classmethod(lambda cls: issubclass(cls, kind))


class Kinds:
    """`recipe.delayed()` and so on: which kind of recipe it is."""

    delayed = _asks(recipes.DelayedScaling)
    float8_current_scaling = _asks(recipes.Float8CurrentScaling)
    float8_block_scaling = _asks(recipes.Float8BlockScaling)
    mxfp8 = _asks(recipes.MXFP8BlockScaling)
    nvfp4 = _asks(recipes.NVFP4BlockScaling)
    custom = _asks(recipes.CustomRecipe)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        return cls.delayed() or cls.float8_current_scaling()


value = dataclass(frozen=True, kw_only=True, repr=False)


@value
class DelayedScaling(Kinds, recipes.DelayedScaling, metaclass=TheirRecipe):
    """FP8 with scales that follow from earlier steps: from a scale of 1 on, and with all amaxes as they are."""

    order: ClassVar[str] = (
        "margin fp8_format amax_history_len amax_compute_algo scaling_factor_compute_algo reduce_amax fp8_dpa fp8_mha"
    )
    numerics: ClassVar[Options] = {"first_scale_from_amax": False, "skip_nonfinite_amax": False, "spike_factor": 0.0}


@value
class Float8CurrentScaling(Kinds, recipes.Float8CurrentScaling, metaclass=TheirRecipe):
    """FP8 with one scale for each tensor."""

    order: ClassVar[str] = "use_power_2_scales fp8_format"
    numerics: ClassVar[Options] = {}


@value
class Float8BlockScaling(Kinds, recipes.Float8BlockScaling, metaclass=TheirRecipe):
    """FP8 with scales of blocks. Products never accumulate fast."""

    order: ClassVar[str] = "use_f32_scales fp8_format"
    numerics: ClassVar[Options] = {"fprop_fast_accum": False}


@value
class MXFP8BlockScaling(Kinds, recipes.MXFP8BlockScaling, metaclass=TheirRecipe):
    """MXFP8."""

    order: ClassVar[str] = "margin fp8_format fp8_dpa fp8_mha"
    numerics: ClassVar[Options] = {}


@value
class NVFP4BlockScaling(Kinds, recipes.NVFP4BlockScaling, metaclass=TheirRecipe):
    """NVFP4."""

    order: ClassVar[str] = "disable_rht disable_stochastic_rounding disable_2d_quantization"
    numerics: ClassVar[Options] = {}


@value
class CustomRecipe(Kinds, recipes.CustomRecipe, metaclass=TheirRecipe):
    """Formats from a function of the role."""

    order: ClassVar[str] = "qfactory fp8_dpa fp8_mha"
    numerics: ClassVar[Options] = {}
