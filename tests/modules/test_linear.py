"""duotone.Linear: nn.Linear's arguments and parameters, with a recipe."""

import pytest
import torch
from torch import nn

import duotone
from duotone import recipes


def test_it_has_the_parameters_of_nn_linear_and_no_more_in_its_state_dict() -> None:
    torch.manual_seed(3)
    ours = duotone.Linear(32, 16, params_dtype=torch.bfloat16, recipe=recipes.load("nvfp4"))
    torch.manual_seed(3)
    theirs = nn.Linear(32, 16, dtype=torch.bfloat16)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert torch.equal(ours.weight, theirs.weight) and torch.equal(ours.bias, theirs.bias)
    assert duotone.Linear(32, 16, bias=False).bias is None


def test_its_recipe_gives_the_bits_of_a_converted_nn_linear() -> None:
    ours = duotone.Linear(32, 16, recipe=recipes.load("mxfp8"))
    theirs = nn.Linear(32, 16)
    theirs.load_state_dict(ours.state_dict())
    duotone.convert(theirs, recipes.load("mxfp8"))
    x = torch.randn(8, 32)
    assert torch.equal(ours(x), theirs(x))


def test_without_a_recipe_only_autocast_quantizes() -> None:
    ours = duotone.Linear(32, 16)
    x = torch.randn(8, 32)
    plain = nn.functional.linear(x, ours.weight, ours.bias)
    assert torch.equal(ours(x), plain)
    with duotone.autocast(recipe=recipes.load("nvfp4")):
        assert not torch.equal(ours(x), plain)


def test_everything_after_the_sizes_is_keyword_only() -> None:
    with pytest.raises(TypeError):
        duotone.Linear(32, 16, False)


def test_a_plan_is_built_once_per_recipe_dtype_and_gradients() -> None:
    ours = duotone.Linear(32, 16, recipe=recipes.load("mxfp8"))
    x = torch.randn(8, 32)
    first = ours.plan_for(x, ours.weight)
    assert ours.plan_for(x.clone(), ours.weight) is first
    with torch.no_grad():
        without = ours.plan_for(x, ours.weight)
    assert without is not first and not without.weight_grad
    assert ours.plan_for(x, ours.weight) is first
