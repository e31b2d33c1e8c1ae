"""The amax floor of fp32 scales: part of a format's name, and of the scale rule."""

import pickle

import pytest
import torch

from duotone import recipes
from duotone.errors import RecipeError, UserError
from duotone.formats import get
from duotone.recipes.roles import QuantizerRole


@pytest.mark.parametrize("name", ["fp8_e4m3_tensor", "fp8_e5m2_row", "fp8_e4m3_1x128_fp32", "fp8_e4m3_128x128"])
def test_an_amax_below_the_floor_counts_as_the_floor(name: str) -> None:
    """core 14."""
    floored = get(f"{name}_eps0.5")
    small, large = torch.full((4, 160), 0.25), torch.full((4, 160), 0.75)
    small[0, 0] = -0.125
    at_floor = torch.full((4, 160), 0.5)
    assert torch.equal(floored.encode(small)["scale"], get(name).encode(at_floor)["scale"])
    assert torch.equal(floored.encode(torch.zeros(4, 160))["scale"], get(name).encode(at_floor)["scale"])
    for part, value in get(name).encode(large).items():
        assert torch.equal(floored.encode(large)[part], value)
    infinite = torch.full((4, 160), torch.inf)
    assert torch.equal(floored.encode(infinite)["scale"], get(name).encode(infinite)["scale"])


def test_the_floor_is_part_of_the_name_and_survives_pickle() -> None:
    fmt = get("fp8_e4m3_tensor_eps1e-12")
    assert fmt is get("fp8_e4m3_tensor_eps1e-12") and pickle.loads(pickle.dumps(fmt)) is fmt
    assert fmt != get("fp8_e4m3_tensor") and fmt.rule.epsilon == 1e-12


@pytest.mark.parametrize("name", ["fp8_e4m3_tensor_eps0", "fp8_e4m3_tensor_eps-1", "fp8_e4m3_tensor_epsx"])
def test_a_floor_that_is_no_positive_number_is_refused(name: str) -> None:
    with pytest.raises(RecipeError, match="is no positive number"):
        get(name)


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "nvfp4", "identity", "fp8_e4m3_delayed"])
def test_a_format_without_an_amax_floor_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="has no amax floor"):
        get(f"{name}_eps1e-12")


@pytest.mark.parametrize(
    "kind", [recipes.Float8CurrentScaling, recipes.Float8RowwiseScaling, recipes.Float8BlockScaling]
)
def test_recipes_pass_the_floor_to_every_format(kind) -> None:
    """core 53."""
    recipe = kind(amax_epsilon=1e-6)
    for tensor_type in ("input", "weight", "grad_output"):
        result = recipe(QuantizerRole("linear", tensor_type))
        assert result.rowwise.rule.epsilon == result.columnwise.rule.epsilon == 1e-6
    assert recipes.from_dict(recipe.to_dict()) == recipe != kind()
    with pytest.raises(RecipeError, match="amax_epsilon is -1"):
        kind(amax_epsilon=-1)
