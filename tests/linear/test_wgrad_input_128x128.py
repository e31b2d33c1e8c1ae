"""Float8BlockScaling(wgrad_input_128x128=True): wgrad of 1x128 with 128x128 blocks, emulated here."""

import pytest
import torch
from torch import Tensor, nn

import duotone
from duotone import recipes
from duotone.recipes.roles import TENSOR_TYPES, QuantizerRole

TOKENS, IN, OUT = 200, 300, 140


def step(recipe: recipes.Recipe, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    module = duotone.convert(nn.Linear(IN, OUT, bias=False, dtype=x.dtype), recipe)
    with torch.no_grad():
        module.weight.copy_(w)
    leaf = x.clone().requires_grad_()
    y = module(leaf)
    y.backward(dy)
    assert leaf.grad is not None and module.weight.grad is not None
    return y.detach(), leaf.grad, module.weight.grad


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Features and tokens of very different size, so that it shows which of them share a scale."""
    x, w, dy = (torch.randn(shape) for shape in ((TOKENS, IN), (OUT, IN), (TOKENS, OUT)))
    x, dy = x * torch.logspace(-8, 8, IN), dy * torch.logspace(2, -2, TOKENS)[:, None]
    return x.to(dtype), w.to(dtype), dy.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("powers", [True, False])
def test_the_products_are_those_of_the_decoded_operands(powers, dtype) -> None:
    recipe = recipes.Float8BlockScaling(wgrad_input_128x128=True, power_of_two_scales=powers)
    inputs = operands(dtype)
    y, dx, dw = step(recipe, *inputs)
    results = [recipe(QuantizerRole("linear", kind)).encode(t) for kind, t in zip(TENSOR_TYPES, inputs, strict=True)]
    assert results[0].rowwise.parts["scale"].shape == (TOKENS, 3) and results[0].columnwise.parts["scale"].shape == (
        3,
        2,
    )
    (xr, xc), (wr, wc), (gr, gc) = ([p.dequantize(torch.float32).double() for p in planes] for planes in results)
    epsilon = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-17
    for result, a, b in ((y, xr, wr.t()), (dx, gr, wc.t()), (dw, gc, xc.t())):
        assert ((result.double() - a @ b).abs() <= epsilon * (a.abs() @ b.abs())).all()


def test_only_wgrad_differs_from_the_plain_form() -> None:
    inputs = operands(torch.float32)
    plain, square = (step(recipes.Float8BlockScaling(wgrad_input_128x128=on), *inputs) for on in (False, True))
    assert torch.equal(plain[0], square[0]) and torch.equal(plain[1], square[1])
    exact = inputs[2].double().t() @ inputs[0].double()
    lost = [((dw.double() - exact).norm(dim=0) / exact.norm(dim=0)).max().item() for *_, dw in (plain, square)]
    assert lost[0] < 0.1 < 0.5 < lost[1]  # the smallest features of a square keep nothing


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_backward_in_high_precision_never_makes_the_squares(override) -> None:
    inputs = operands(torch.float32)
    results = [
        step(recipes.Float8BlockScaling(wgrad_input_128x128=on, backward_override=override), *inputs)
        for on in (False, True)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_input_encoded_again_in_backward_gives_the_same_bits() -> None:
    recipe = recipes.Float8BlockScaling(wgrad_input_128x128=True)
    x, dy = torch.randn(TOKENS, IN), torch.randn(TOKENS, OUT)
    results = []
    for again in (False, True):
        torch.manual_seed(0)
        module = duotone.Linear(IN, OUT, recipe=recipe, save_original_input=again)
        results.append(torch.autograd.grad(module(x), list(module.parameters()), dy))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
