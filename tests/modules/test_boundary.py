"""Quantized outputs and input gradients, in the formats of the consumer whose role is set."""

import warnings

import pytest
import torch

import duotone
from duotone import CustomRecipe, QuantizedTensor, Quantizer, QuantizerRole, formats
from duotone.tensor import MXFP8Quantizer

E5M2 = formats.get("fp8_e5m2_row")


def factory(role):
    """Another format for whatever a consumer named "next" reads."""
    return Quantizer(E5M2, E5M2) if role is not None and role.name == "next" else MXFP8Quantizer()


@pytest.fixture
def module() -> duotone.Linear:
    return duotone.Linear(64, 32, recipe=CustomRecipe(qfactory=factory), name="this", params_dtype=torch.bfloat16)


def test_the_role_of_a_consumer_decides_the_format_of_the_boundary(module) -> None:
    """hybrid 77, 78."""
    module.output_quantizer_role = QuantizerRole("linear", "input", "next")
    module.grad_input_quantizer_role = QuantizerRole("linear", "grad_output", "next")
    x = torch.randn(16, 64).bfloat16().requires_grad_()
    plain = module(x)
    plain.sum().backward()
    gradient, x.grad = x.grad, None
    y = module(x, fp8_output=True, fp8_grad=True)
    assert isinstance(y, QuantizedTensor) and y.planes.rowwise.format == E5M2
    assert torch.equal(y.dequantize(), Quantizer(E5M2, E5M2).quantize(plain.detach()).dequantize())
    y.sum().backward()
    got = x.grad.dequantize() if isinstance(x.grad, QuantizedTensor) else x.grad
    assert torch.equal(got, Quantizer(E5M2, E5M2).quantize(gradient).dequantize())
    module.output_quantizer_role = QuantizerRole("linear", "input", "other")
    assert module(x, fp8_output=True).planes.rowwise.format.name == "mxfp8_e4m3"


def test_a_boundary_without_a_role_is_a_warning(module) -> None:
    """hybrid 81."""
    x = torch.randn(16, 64).bfloat16()
    with pytest.warns(UserWarning, match=r"this: the output is quantized .* set output_quantizer_role"):
        module(x, fp8_output=True)
    with pytest.warns(UserWarning, match="set grad_input_quantizer_role"):
        module(x, fp8_grad=True)
    module.output_quantizer_role = QuantizerRole("linear", "input", "next")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(x, fp8_output=True)
        module(x)


def test_a_quantized_output_is_the_next_modules_input_as_it_is(module) -> None:
    """core 6.1: an input that is quantized already is used as is, its columnwise plane for wgrad."""
    module.output_quantizer_role = QuantizerRole("linear", "input", "following")
    following = duotone.Linear(32, 16, recipe=module.recipe, name="following", params_dtype=torch.bfloat16)
    x = torch.randn(2, 16, 64).bfloat16().requires_grad_()
    quantized = following(module(x, fp8_output=True))
    quantized.sum().backward()
    gradients = [x.grad.clone(), following.weight.grad.clone(), module.weight.grad.clone()]
    x.grad = None
    following.zero_grad(), module.zero_grad()
    plain = following(module(x))
    plain.sum().backward()
    assert torch.equal(quantized, plain)
    for got, want in zip(gradients, (x.grad, following.weight.grad, module.weight.grad), strict=True):
        assert torch.equal(got, want)
