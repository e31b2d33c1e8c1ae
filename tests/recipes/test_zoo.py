"""The factory zoo: each function, the recipe of the same name, and what both give to each role."""

import pytest
import torch

import duotone
from duotone import recipes
from duotone.compat import factories as zoo
from duotone.recipes import CustomRecipe, QuantizerRole

LINEAR_ROLES = [
    QuantizerRole(module_type, tensor_type, "a.b")
    for module_type in ("linear", "grouped_linear")
    for tensor_type in ("input", "weight", "grad_output")
]
OTHER_ROLES = [
    *(QuantizerRole("dpa", tensor_type, "a.core") for tensor_type in ("qkv", "s", "do", "dp", "dqkv")),
    QuantizerRole("", "", "a.core.dpa_output"),
    QuantizerRole("", "", "a.core.dpa_grad_input"),
    QuantizerRole(),
]
M8, ROW4, PLAIN4 = "mxfp8_e4m3", "nvfp4_row", "nvfp4"
SR = "nvfp4_sr/nvfp4_rht_sr"
RHT = "nvfp4/nvfp4_rht"
LAST = " from rowwise"

TABLE = {
    # input, weight, grad_output of linear; then of grouped_linear where that differs
    "high_precision": ["identity"] * 3,
    "delayed_scaling": ["fp8_e4m3_delayed", "fp8_e4m3_delayed", "fp8_e5m2_delayed"],
    "current_scaling": ["fp8_e4m3_tensor", "fp8_e4m3_tensor", "fp8_e5m2_tensor"],
    "float8_block_scaling": ["fp8_e4m3_1x128", "fp8_e4m3_128x128", "fp8_e4m3_1x128"],
    "mxfp8": [M8] * 3,
    "nvfp4": [RHT, "nvfp4_16x16", SR],
    "high_precision_fwd_mxfp8_bwd": [f"identity/{M8}", f"identity/{M8}", M8],
    "mxfp8_fwd_nvfp4_bwd": [f"{M8}/nvfp4_rht", f"{M8}/nvfp4{LAST}", SR],
    "nvfp4_1d_weight": [RHT, f"{PLAIN4}{LAST}", SR],
    "mxfp8_fwd_high_precision_bwd": [f"{M8}/identity{LAST}", f"{M8}/identity{LAST}", "identity"],
    "nvfp4_row_scaled_fwd_mxfp8_bwd": [M8, M8, M8, f"{ROW4}/{M8}{LAST}", f"{PLAIN4}/{M8}{LAST}", M8],
    "nvfp4_row_scaled_fwd_high_precision_bwd": [
        f"{ROW4}/identity{LAST}",
        f"{PLAIN4}/identity{LAST}",
        "identity",
    ],
    "nvfp4_linear_fp8_dpa": [RHT, "nvfp4_16x16", SR],
}


def words(quantizer):
    planes = "/".join(dict.fromkeys((quantizer.rowwise.name, quantizer.columnwise.name)))
    return planes + LAST * (quantizer.columnwise_source == "rowwise_dequantized")


@pytest.mark.parametrize("name", TABLE)
def test_each_factory_gives_each_role_what_the_table_says(name):
    """hybrid 86"""
    recipe = CustomRecipe(qfactory=getattr(zoo, f"{name}_factory"))
    result = [words(recipe(role)) for role in LINEAR_ROLES]
    assert result == (TABLE[name] * 2)[:6]


@pytest.mark.parametrize(("name", "factory"), zoo.RECIPES.items())
def test_each_factory_and_its_recipe_give_equal_quantizers(name, factory):
    """hybrid 86, 87: base factories are the built-in recipes, the others the recipe files."""
    recipe, custom = recipes.load(name), CustomRecipe(qfactory=factory)
    assert [custom(role) for role in LINEAR_ROLES] == [recipe(role) for role in LINEAR_ROLES]
    if name != "mxfp8-fwd-nvfp4-bwd":  # its file has rules for linears alone
        assert [custom(role) for role in OTHER_ROLES] == [recipe(role) for role in OTHER_ROLES]


def test_every_factory_has_a_recipe_and_a_row_in_the_table():
    functions = {name for name in vars(zoo) if name.endswith("_factory")}
    assert {factory.__name__ for factory in zoo.RECIPES.values()} == functions == {f"{name}_factory" for name in TABLE}
    for name, factory in list(zoo.RECIPES.items())[6:]:
        assert factory.__name__ == name.replace("-", "_") + "_factory"


@pytest.mark.parametrize("factory", zoo.RECIPES.values(), ids=list(zoo.RECIPES))
def test_each_call_gives_a_new_object_and_none_is_a_role(factory):
    """hybrid 86: a distinct instance per call."""
    for role in (*LINEAR_ROLES, *OTHER_ROLES, None):
        assert factory(role) is not factory(role)
    assert CustomRecipe(qfactory=factory)(None).rowwise is not None


def test_attention_of_the_nvfp4_linear_factory_is_fp8_with_a_delayed_softmax():
    """hybrid 86: the row of nvfp4_linear_fp8_dpa_factory that concerns attention."""
    recipe = recipes.load("nvfp4-linear-fp8-dpa")
    output = {role.tensor_type or role.name: recipe(role) for role in OTHER_ROLES[:-1]}
    assert {key: words(result) for key, result in output.items()} == {
        "qkv": "fp8_e4m3_tensor",
        "s": "fp8_e4m3_delayed",
        "do": "fp8_e5m2_tensor",
        "dp": "fp8_e5m2_delayed",
        "dqkv": "fp8_e5m2_tensor",
        "a.core.dpa_output": "fp8_e4m3_tensor",
        "a.core.dpa_grad_input": "fp8_e5m2_tensor",
    }
    assert (output["s"].history.amax_history_len, output["s"].history.amax_compute_algo) == (1, "most_recent")


def bits(recipe, module_type=duotone.Linear):
    """Output and gradients of a linear under the recipe, from the same numbers each time."""
    torch.manual_seed(7)
    m = module_type(64, 128, params_dtype=torch.bfloat16, name="a", recipe=recipe)
    results = []
    for _ in range(2):
        x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
        y = m(x)
        y.backward(torch.randn_like(y))
        results += [y.detach(), x.grad, m.weight.grad.clone()]
    return results


@pytest.mark.parametrize("name", list(zoo.RECIPES)[:6])
def test_each_base_factory_is_its_built_in_recipe_bit_for_bit(name):
    """hybrid 87: outputs, input and weight gradients, over two steps."""
    expected, result = bits(recipes.load(name)), bits(CustomRecipe(qfactory=zoo.RECIPES[name]))
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    if name != "bf16":
        assert not torch.equal(result[0], bits(recipes.load("bf16"))[0])


@pytest.mark.parametrize("name", list(zoo.RECIPES)[6:])
def test_each_other_factory_is_its_recipe_file_bit_for_bit(name):
    expected, result = bits(recipes.load(name)), bits(CustomRecipe(qfactory=zoo.RECIPES[name]))
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


def test_mxfp8_forward_and_high_precision_backward_is_the_dequantized_override_bit_for_bit():
    """hybrid 86: the row of mxfp8_fwd_high_precision_bwd_factory."""
    expected = bits(recipes.MXFP8BlockScaling(backward_override="dequantized"))
    result = bits(CustomRecipe(qfactory=zoo.mxfp8_fwd_high_precision_bwd_factory))
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    assert not torch.equal(result[1], bits(recipes.load("mxfp8"))[1])
