"""Environment variables of Transformer Engine that change numbers: defaults of recipes, or refused by name."""

import dataclasses

import pytest
import torch

import duotone
import duotone.compat.te
from duotone.compat.transformer_engine.environment import REFUSED as REFUSED_VARIABLES


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules are built on a GPU where one is. Inputs of these tests are on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


HONOURED = [
    ("NVTE_BACKWARD_OVERRIDE", "high_precision", "MXFP8BlockScaling", "backward_override", "high_precision", None),
    ("NVTE_BACKWARD_OVERRIDE", "dequantized", "Float8BlockScaling", "backward_override", "dequantized", None),
    ("NVTE_BACKWARD_OVERRIDE", "dequantized", "NVFP4BlockScaling", "backward_override", "dequantized", None),
    ("NVTE_BACKWARD_OVERRIDE", "dequantized", "Float8CurrentScaling", "backward_override", "dequantized", None),
    ("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "1", "Float8CurrentScaling", "power_of_two_scales", True, False),
    ("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1", "Float8BlockScaling", "power_of_two_scales", False, True),
    ("NVTE_NVFP4_DISABLE_RHT", "1", "NVFP4BlockScaling", "disable_rht", True, False),
    ("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", "1", "NVFP4BlockScaling", "disable_stochastic_rounding", True, False),
    ("NVTE_NVFP4_DISABLE_2D_QUANTIZATION", "1", "NVFP4BlockScaling", "disable_2d_quantization", True, False),
    ("NVTE_NVFP4_ROW_SCALED_ACTIVATION", "1", "NVFP4BlockScaling", "row_scaled_activation", True, False),
    ("NVTE_NVFP4_4OVER6", "weights", "NVFP4BlockScaling", "nvfp4_4over6", "weights", "none"),
    ("NVTE_NVFP4_4OVER6_E4M3_USE_256", "none", "NVFP4BlockScaling", "nvfp4_4over6_e4m3_use_256", "none", "all"),
    ("NVTE_NVFP4_4OVER6_ERR_MODE", "mse", "NVFP4BlockScaling", "nvfp4_4over6_err_mode", "MSE", "MAE"),
]
"""Variables, a value, a recipe, its field, the field's value, and its value without the variable."""


@pytest.mark.parametrize(("variable", "text", "name", "field", "value", "default"), HONOURED)
def test_variables_give_defaults_of_recipes(te, monkeypatch, variable, text, name, field, value, default) -> None:
    """An argument goes before its variable, and Duotone's own recipes read none."""
    recipe = getattr(te.recipe, name)
    assert getattr(recipe(), field) == default
    monkeypatch.setenv(variable, text)
    made = recipe()
    assert getattr(made, field) == value
    assert getattr(recipe(**{field: default}), field) == default
    assert dataclasses.replace(made, strict=True) == dataclasses.replace(recipe(), strict=True)
    assert getattr(getattr(duotone.recipes, name)(), field) == default
    monkeypatch.setenv(variable, "fast")
    with pytest.raises(duotone.RecipeError, match=f"{variable} is 'fast'; allowed are '.*: set one, or unset it"):
        recipe()


def test_the_backward_override_of_a_variable_changes_what_a_step_computes(te, monkeypatch) -> None:
    x, results = torch.randn(32, 64, requires_grad=True), []
    linear = te.Linear(64, 32, bias=False)
    for text in (None, "high_precision"):
        if text is not None:
            monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", text)
        with te.fp8_autocast(fp8_recipe=te.recipe.MXFP8BlockScaling()):
            y = linear(x)
        results.append(torch.autograd.grad(y.sum(), x)[0])
    assert torch.allclose(results[1], linear.weight.detach().sum(0).expand(32, 64), atol=1e-6)
    assert not torch.equal(*results)


def test_delayed_scaling_refuses_a_backward_override_as_there(te, monkeypatch) -> None:
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "dequantized")
    with pytest.raises(duotone.RecipeError, match="delayed scaling allows None only"):
        te.recipe.DelayedScaling()
    assert te.recipe.DelayedScaling(backward_override=None).backward_override is None


@pytest.mark.parametrize(("variable", "harmless"), REFUSED_VARIABLES.items())
def test_variables_without_a_counterpart_are_refused_by_name(te, monkeypatch, variable, harmless) -> None:
    monkeypatch.setenv(variable, harmless)
    duotone.compat.te.install()
    te.recipe.MXFP8BlockScaling()
    monkeypatch.setenv(variable, "2")
    for act in (duotone.compat.te.install, te.recipe.MXFP8BlockScaling, te.recipe.DelayedScaling):
        with pytest.raises(
            duotone.RecipeError, match=f"^{variable} is '2', which Duotone has no counterpart of; unset"
        ):
            act()
