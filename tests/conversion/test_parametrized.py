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
def model(request: pytest.FixtureRequest) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(request.param(32, 32))


@pytest.mark.parametrize("parametrization", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_revert_gives_back_a_module_that_was_parametrized_before(model, parametrization) -> None:
    parametrization(model[0])
    model.eval()  # spectral_norm steps in training
    x, kind = torch.randn(4, 32), type(model[0])
    before = model(x)
    duotone.convert(model, MXFP8)
    expected = duotone.convert(nn.Sequential(nn.Linear(32, 32)), MXFP8)
    with torch.no_grad():
        expected[0].weight.copy_(model[0].weight)
        expected[0].bias.copy_(model[0].bias)
    assert torch.equal(model(x), expected(x)) and not torch.equal(model(x), before)
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    model(x).sum().backward()
    assert model[0].parametrizations.weight[0] is not None
    assert any(p.grad is not None and p.grad.any() for p in model[0].parametrizations.parameters())
    duotone.revert(model)
    assert type(model[0]) is kind and torch.equal(model(x), before)
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is kind.__bases__[0] and torch.equal(model(x), before)


@pytest.mark.parametrize("kind", [duotone.Linear, duotone.LayerNormLinear, nn.Linear])
def test_a_model_that_is_parametrized_after_its_conversion_can_be_copied(kind) -> None:
    """An average copies the model. torch lets a parametrized module be copied, but not pickled."""
    model = duotone.convert(nn.Sequential(kind(32, 32)), MXFP8)
    parametrizations.weight_norm(model[0])
    x, copied = torch.randn(4, 32), copy.deepcopy(model)
    assert torch.equal(copied(x), model(x))
    with torch.no_grad():
        copied[0].parametrizations.weight.original0.mul_(2)
    assert not torch.equal(copied(x), model(x))


def test_a_parametrization_can_be_removed_while_the_module_is_converted(model) -> None:
    parametrizations.weight_norm(model[0])
    kind, x = type(model[0]).__bases__[0], torch.randn(4, 32)
    duotone.convert(model, MXFP8)
    y = model(x)
    parametrize.remove_parametrizations(model[0], "weight")
    assert torch.equal(model(x), y) and isinstance(model[0].weight, nn.Parameter)
    assert type(duotone.revert(model)[0]) is kind


def test_a_parametrization_more_or_less_is_refused_by_revert_and_changes_nothing(model) -> None:
    parametrizations.weight_norm(model[0])
    duotone.convert(model, MXFP8)
    parametrize.register_parametrization(model[0], "bias", Halved())
    planned = type(model[0])
    with pytest.raises(UserError, match="0 was parametrized after it was converted; remove its parametrizations first"):
        duotone.revert(model)
    assert type(model[0]) is planned
    parametrize.remove_parametrizations(model[0], "bias")
    duotone.revert(model)
    assert parametrize.is_parametrized(model[0], "weight") and isinstance(model[0].bias, nn.Parameter)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_the_older_norms_of_torch_which_are_hooks_convert_and_revert(norm) -> None:
    m, x = nn.Sequential(norm(nn.Linear(32, 32))).eval(), torch.randn(4, 32)
    before = m(x)
    duotone.convert(m, MXFP8)
    assert not torch.equal(m(x), before)
    assert torch.equal(duotone.revert(m)(x), before)


@pytest.mark.parametrize("name", ["bf16", "mxfp8", "fp8-delayed"])
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_a_spectral_norm_steps_once_a_forward_and_not_when_somebody_looks(name: str, is_compiled: bool) -> None:
    """torch's own linear is the reference: its power iteration steps once each time that forward reads the weight."""
    torch.manual_seed(0)
    plain = nn.Sequential(parametrizations.spectral_norm(nn.Linear(32, 32)))
    model = copy.deepcopy(plain)

    def vectors(m: nn.Sequential) -> list[torch.Tensor]:
        return [buffer.clone() for buffer in m[0].parametrizations.buffers()]

    before = vectors(model)
    duotone.convert(model, name)
    str(duotone.plan(model))
    assert all(map(torch.equal, vectors(model), before))
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if is_compiled else model
    for _ in range(3):
        x = torch.randn(4, 32)
        run(x).sum().backward()
        plain(x).sum().backward()
        assert all(map(torch.equal, vectors(model), vectors(plain)))
        assert not all(map(torch.equal, vectors(model), before))
