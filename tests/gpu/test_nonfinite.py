"""On a CUDA device: NaN and infinities in the operands of linears reach their results, under every recipe."""

import math

import pytest
import torch
from torch import Tensor, nn

import duotone
from duotone import recipes

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device; run `PYTHONPATH=src python -m pytest tests/gpu` on one",
)

RECIPES = recipes.names()
OPERANDS = ("input", "weight", "grad_output")
M, K, N = 256, 512, 384


def products(module: nn.Module, x: Tensor, dy: Tensor, *splits: list[int]) -> dict[str, Tensor]:
    """y, dx and the gradients of the weights of one forward and backward, in fp32."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    y = module(x, *splits)
    y.backward(dy)
    weights = {
        name.removeprefix("_orig_mod."): p.grad.float() for name, p in module.named_parameters() if p.grad is not None
    }
    assert x.grad is not None
    return {"y": y.detach().float(), "dx": x.grad.float(), **weights}


def hidden(result: dict[str, Tensor], want: dict[str, Tensor]) -> list[str]:
    """The results that are finite where they should not be."""
    return [name for name in want if (result[name].isfinite() & ~want[name].isfinite()).any()]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", RECIPES)
def test_results_are_not_finite_where_high_precision_is_not(name, compiled) -> None:
    for operand in OPERANDS:
        for value in (math.nan, math.inf):
            torch.manual_seed(0)
            layer = nn.Linear(K, N, bias=False, device="cuda", dtype=torch.bfloat16)
            x, dy = (torch.randn(M, n, device="cuda", dtype=torch.bfloat16) for n in (K, N))
            {"input": x, "weight": layer.weight.data, "grad_output": dy}[operand][129, 140] = value
            want = products(layer, x, dy)
            duotone.convert(layer, recipes.load(name), rules=())
            call = torch.compile(layer, backend="aot_eager") if compiled else layer
            for step in range(2):
                assert not hidden(products(call, x, dy), want), (operand, value, step)
            torch.compiler.reset()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("name", ["fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4"])
def test_one_expert_keeps_what_is_not_finite_and_no_other_one_meets_it(name, on_device) -> None:
    torch.manual_seed(0)
    counts = [128, 96, 160]
    splits = torch.tensor(counts, device="cuda") if on_device else counts
    experts = duotone.GroupedLinear(3, K, N, bias=False, device="cuda", params_dtype=torch.bfloat16)
    x, dy = (torch.randn(sum(counts), n, device="cuda", dtype=torch.bfloat16) for n in (K, N))
    with duotone.autocast(recipe=recipes.load("bf16")):
        x[150, 7] = math.inf
        want = products(experts, x, dy, splits)
    with duotone.autocast(recipe=recipes.load(name)):
        result = products(experts, x, dy, splits)
    assert not hidden(result, want)
    for name, rows in (("y", slice(0, 128)), ("y", slice(224, None)), ("dx", slice(0, 128)), ("dx", slice(224, None))):
        assert result[name][rows].isfinite().all(), name
    assert all(result[f"weight{i}"].isfinite().all() for i in (0, 2))


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "bf16"])
def test_large_values_that_saturate_stay_finite(name) -> None:
    layer = nn.Linear(K, N, bias=False, device="cuda", dtype=torch.bfloat16)
    x, dy = (torch.randn(M, n, device="cuda", dtype=torch.bfloat16) for n in (K, N))
    x[3, 5] = 3e30
    duotone.convert(layer, recipes.load(name), rules=())
    assert all(result.isfinite().all() for result in products(layer, x, dy).values())
