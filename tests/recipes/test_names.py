"""Names that users of Transformer Engine write: each has its meaning, or an error that says what to write instead."""

import pickle

import pytest
import torch

import duotone
from duotone import RecipeError, recipes
from duotone.formats import get
from duotone.recipes import CustomRecipe, Format, NVFP4BlockScaling, QuantizerRole
from duotone.tensor import Quantizer

LINEAR = [QuantizerRole("linear", kind, "l") for kind in ("input", "weight", "grad_output")]
GRADIENT = ("nvfp4_sr", "nvfp4_rht_sr")


def test_formats_of_an_enumeration_are_the_strings() -> None:
    for name in ("HYBRID", "E4M3", "E5M2"):
        recipe = recipes.Float8CurrentScaling(fp8_format=Format[name])
        assert recipe == recipes.Float8CurrentScaling(fp8_format=name)
        assert recipe.key == recipes.Float8CurrentScaling(fp8_format=name).key
        assert pickle.loads(pickle.dumps(recipe)) == recipes.from_dict(recipe.to_dict()) == recipe
        assert f'fp8_format = "{name}"' in recipes.dumps(recipe)
        assert recipes.DelayedScalingRequest(fp8_format=Format[name]).fp8_format == name


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            CustomRecipe,
            {"qfactory": len, "fp8_format": "HYBRID"},
            "CustomRecipe has no fp8_format; its tensors",
        ),
        (recipes.Float8CurrentScaling, {"use_power_2_scales": True}, "use_power_2_scales; write power_of_two_scales"),
        (recipes.Float8BlockScaling, {"use_f32_scales": True}, "write power_of_two_scales, which is its opposite"),
        (recipes.DelayedScaling, {"fp8_gemm_fprop": None}, "write fprop_fast_accum"),
        (NVFP4BlockScaling, {"fp4_format": Format.E2M1}, "NVFP4 has one element, E2M1: leave it out"),
        (recipes.MXFP8BlockScaling, {"fp8_format": Format.E2M1}, "allowed are 'HYBRID', 'E4M3', 'E5M2'"),
        (recipes.MXFP8BlockScaling, {"fp8_fromat": "E4M3"}, "MXFP8BlockScaling has no fp8_fromat; allowed are strict,"),
    ],
)
def test_a_field_that_is_not_there_is_one_line_with_the_remedy(kind, fields, message) -> None:
    with pytest.raises(RecipeError) as error:
        kind(**fields)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_fields_go_by_name() -> None:
    with pytest.raises(RecipeError, match=r"CustomRecipe takes its fields by name; allowed are .*qfactory"):
        CustomRecipe(len)


@pytest.mark.parametrize(
    ("fields", "activation", "weight"),
    [
        ({}, ("nvfp4", "nvfp4_rht"), "nvfp4_16x16"),
        ({"row_scaled_activation": True}, ("nvfp4_row", "nvfp4_rht"), "nvfp4_16x16"),
        ({"nvfp4_4over6": "weights"}, ("nvfp4", "nvfp4_rht"), "nvfp4_16x16_4over6"),
        ({"nvfp4_4over6": "activations"}, ("nvfp4_4over6", "nvfp4_rht"), "nvfp4_16x16"),
        (
            {"nvfp4_4over6": "all", "nvfp4_4over6_e4m3_use_256": "weights", "nvfp4_4over6_err_mode": "MSE"},
            ("nvfp4_4over6_448_mse", "nvfp4_rht"),
            "nvfp4_16x16_4over6_mse",
        ),
        (
            {
                "nvfp4_4over6": "all",
                "nvfp4_4over6_e4m3_use_256": "none",
                "disable_rht": True,
                "disable_2d_quantization": True,
                "row_scaled_activation": True,
            },
            ("nvfp4_row_4over6_448", "nvfp4_4over6_448"),
            "nvfp4_4over6_448",
        ),
    ],
)
def test_fields_of_nvfp4_choose_the_formats_and_forward_multiplies_them(fields, activation, weight) -> None:
    """numerics 7.5, 7.6: gradients choose nothing; the product is that of what the formats decode to."""
    recipe = NVFP4BlockScaling(**fields)
    names = [(result.rowwise.name, result.columnwise.name) for result in map(recipe, LINEAR)]
    gradient = GRADIENT if not fields.get("disable_rht") else ("nvfp4_sr", "nvfp4_sr")
    assert names == [activation, (weight, weight), gradient]
    assert recipe(QuantizerRole("linear", "output")) == recipe(LINEAR[0])
    assert recipes.from_dict(recipe.to_dict()) == recipe
    module, x = duotone.Linear(64, 32, bias=False, recipe=recipe), torch.randn(48, 64, requires_grad=True)
    y = module(x)
    row, wide = (
        Quantizer(get(name), None).quantize(t.detach()).dequantize().double()
        for name, t in ((activation[0], x), (weight, module.weight))
    )
    torch.testing.assert_close(y.detach().double(), row @ wide.t(), rtol=1e-5, atol=1e-5)  # fp32 sums of 64 products
    y.sum().backward()
    assert x.grad.isfinite().all() and module.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("field", "value"),
    [("nvfp4_4over6", "input"), ("nvfp4_4over6_e4m3_use_256", True), ("nvfp4_4over6_err_mode", "mse")],
)
def test_words_that_nvfp4_does_not_know_are_refused(field, value) -> None:
    with pytest.raises(RecipeError, match=f"{field} {value!r} is unknown; allowed are"):
        NVFP4BlockScaling(**{field: value})


def newest(history: torch.Tensor) -> torch.Tensor:
    return history[-1]


@pytest.mark.parametrize(
    "value",
    [
        recipes.DelayedScaling(amax_compute_algo=newest),
        recipes.DelayedScalingRequest(amax_compute_algo=newest),
        recipes.DelayedScaling(amax_compute_algo=newest)(None),
        CustomRecipe(qfactory=lambda role: Quantizer()),
        CustomRecipe(qfactory=lambda role: Quantizer())(None),
        recipes.Rule(module="*.up", format="nvfp4_rht_sr"),
        recipes.load("mxfp8-fwd-nvfp4-bwd"),
        recipes.Schedule((recipes.Phase(recipes.DelayedScaling(amax_compute_algo=newest), 0),)),
        get("nvfp4_4over6_mse"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_no_repr_shows_an_address(value) -> None:
    assert "0x" not in repr(value) and "0x" not in str(getattr(value, "name", ""))


def test_a_repr_has_the_fields_that_differ_from_their_defaults() -> None:
    assert repr(recipes.DelayedScaling(margin=1)) == "DelayedScaling(margin=1)"
    assert repr(get("mxfp4")) == "duotone.formats.get('mxfp4')"
