"""Linears that torch parametrized: convert and revert keep what they compute, and torch can still take it away."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import duotone
from duotone import recipes
from duotone.errors import UserError

MXFP8 = recipes.load("mxfp8")


class Plain(nn.Linear):
    """A subclass without a forward of its own."""


class Halved(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


@pytest.fixture(params=[nn.Linear, Plain])
def made(request: pytest.FixtureRequest) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(request.param(32, 32))


@pytest.mark.parametrize("parametrization", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_revert_gives_back_a_module_that_was_parametrized_before(made, parametrization) -> None:
    parametrization(made[0])
    made.eval()  # spectral_norm steps in training
    x, kind = torch.randn(4, 32), type(made[0])
    before = made(x)
    duotone.convert(made, MXFP8)
    expected = duotone.convert(nn.Sequential(nn.Linear(32, 32)), MXFP8)
    with torch.no_grad():
        expected[0].weight.copy_(made[0].weight)
        expected[0].bias.copy_(made[0].bias)
    assert torch.equal(made(x), expected(x)) and not torch.equal(made(x), before)
    assert torch.equal(copy.deepcopy(made)(x), made(x))
    made(x).sum().backward()
    assert made[0].parametrizations.weight[0] is not None
    assert any(p.grad is not None and p.grad.any() for p in made[0].parametrizations.parameters())
    duotone.revert(made)
    assert type(made[0]) is kind and torch.equal(made(x), before)
    parametrize.remove_parametrizations(made[0], "weight")
    assert type(made[0]) is kind.__bases__[0] and torch.equal(made(x), before)


def test_a_parametrization_can_be_removed_while_the_module_is_converted(made) -> None:
    parametrizations.weight_norm(made[0])
    kind, x = type(made[0]).__bases__[0], torch.randn(4, 32)
    duotone.convert(made, MXFP8)
    y = made(x)
    parametrize.remove_parametrizations(made[0], "weight")
    assert torch.equal(made(x), y) and isinstance(made[0].weight, nn.Parameter)
    assert type(duotone.revert(made)[0]) is kind


def test_a_parametrization_more_or_less_is_refused_by_revert_and_changes_nothing(made) -> None:
    parametrizations.weight_norm(made[0])
    duotone.convert(made, MXFP8)
    parametrize.register_parametrization(made[0], "bias", Halved())
    planned = type(made[0])
    with pytest.raises(UserError, match="0 was parametrized after it was converted; remove its parametrizations first"):
        duotone.revert(made)
    assert type(made[0]) is planned
    parametrize.remove_parametrizations(made[0], "bias")
    duotone.revert(made)
    assert parametrize.is_parametrized(made[0], "weight") and isinstance(made[0].bias, nn.Parameter)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_the_older_norms_of_torch_which_are_hooks_convert_and_revert(norm) -> None:
    m, x = nn.Sequential(norm(nn.Linear(32, 32))).eval(), torch.randn(4, 32)
    before = m(x)
    duotone.convert(m, MXFP8)
    assert not torch.equal(m(x), before)
    assert torch.equal(duotone.revert(m)(x), before)
