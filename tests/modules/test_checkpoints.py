"""Checkpoints of converted models and of quantized parameters: plain tensors, both ways, bit for bit."""

import io

import pytest
import torch
from torch import nn

import duotone
from duotone import CustomRecipe, HybridQuantizer, QuantizedTensor, recipes
from duotone.compat import Float8CurrentScalingQuantizer, MXFP8Quantizer

HYBRID = recipes.load("mxfp8-fwd-nvfp4-bwd")


def model(recipe, *, is_quantized: bool) -> nn.Sequential:
    result = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).bfloat16()
    duotone.convert(result, recipe)
    return duotone.convert_parameters(result, recipe) if is_quantized else result


def through_a_file(state) -> dict[str, torch.Tensor]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def train(m: nn.Module, steps: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    out = []
    for _ in range(steps):
        x = torch.randn(16, 64, generator=generator).bfloat16()
        optimizer.zero_grad()
        y = m(x)
        y.square().mean().backward()
        optimizer.step()
        out.append(y.detach())
    return out


@pytest.mark.parametrize("name", ["bf16", "mxfp8", "nvfp4", "fp8-current"])
def test_an_nn_linear_checkpoint_loads_unchanged_and_back(name) -> None:
    """core 77: stateless recipes add no key."""
    plain = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).bfloat16()
    converted = model(recipes.load(name), is_quantized=False)
    assert converted.state_dict().keys() == plain.state_dict().keys()
    converted.load_state_dict(through_a_file(plain.state_dict()))
    plain.load_state_dict(through_a_file(converted.state_dict()))


def test_a_closure_as_factory_does_not_reach_the_checkpoint() -> None:
    """hybrid 47."""
    secret = []

    def factory(role):
        secret.append(role)
        return HybridQuantizer(
            rowwise_quantizer=MXFP8Quantizer(),
            columnwise_quantizer=Float8CurrentScalingQuantizer(),
        )

    recipe = CustomRecipe(qfactory=factory, emulate_mixed=True)
    for is_quantized in (False, True):
        state = through_a_file(model(recipe, is_quantized=is_quantized).state_dict())
        assert set(state) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_a_bf16_checkpoint_loads_into_a_hybrid_model_by_quantizing_it() -> None:
    """hybrid 48."""
    plain = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).bfloat16()
    target = model(HYBRID, is_quantized=True)
    addresses = [part.data_ptr() for part in target[0].weight.planes.columnwise.parts.values()]
    target.load_state_dict(through_a_file(plain.state_dict()))
    assert [part.data_ptr() for part in target[0].weight.planes.columnwise.parts.values()] == addresses
    expected = target[0].weight.quantizer.quantize(plain[0].weight.detach())
    for result, want in zip(target[0].weight.planes, expected.planes, strict=True):
        assert all(torch.equal(result.parts[name], part) for name, part in want.parts.items())


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8-current", "fp8-block", "mxfp8-fwd-nvfp4-bwd"])
@pytest.mark.filterwarnings("ignore:.*of this update is lost")
def test_training_goes_on_from_a_checkpoint_of_quantized_parameters_bit_for_bit(name) -> None:
    """hybrid 48, core 40: bytes are taken over, and the next steps are those of the run that was not interrupted."""
    recipe = recipes.load(name)
    first, second = model(recipe, is_quantized=True), model(recipe, is_quantized=True)
    train(first)
    state = through_a_file(first.state_dict())
    assert isinstance(state["0.weight"], QuantizedTensor)
    second.load_state_dict(state)
    duotone.load_rng_state(second, duotone.rng_state(first))
    for result, want in zip(train(second), train(first), strict=True):
        assert torch.equal(result, want)


def test_a_quantized_checkpoint_loads_into_a_plain_model() -> None:
    quantized = model(HYBRID, is_quantized=True)
    plain = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).bfloat16()
    plain.load_state_dict(through_a_file(quantized.state_dict()))
    assert type(plain[0].weight) is nn.Parameter
    assert torch.equal(plain[0].weight, quantized[0].weight.dequantize())
