"""NaN and infinities in the operands of a linear reach its results, under every recipe and in every position."""

import math

import pytest
import torch
from torch import Tensor, nn

import duotone
from duotone import recipes

RECIPES = recipes.names()
QUANTIZED = [name for name in RECIPES if name != "bf16"]
OPERANDS = ("input", "weight", "grad_output")
M, K, N = 130, 160, 144
"""More than one block of 128 in each direction, the last one cut."""


def products(module: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """y, dx and dw of one forward and backward, in fp32."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    y = module(x)
    y.backward(dy)
    weight = module.get_parameter("weight")
    assert x.grad is not None and weight.grad is not None
    return {"y": y.detach().float(), "dx": x.grad.float(), "dw": weight.grad.float()}


def poisoned(operand: str, value: float, dtype: torch.dtype) -> tuple[nn.Linear, Tensor, Tensor]:
    """A linear, its input and its gradient, of which one holds `value` at one place."""
    torch.manual_seed(0)
    layer = nn.Linear(K, N, bias=False, dtype=dtype)
    x, dy = torch.randn(M, K, dtype=dtype), torch.randn(M, N, dtype=dtype)
    tensors = {"input": x, "weight": layer.weight.data, "grad_output": dy}
    tensors[operand][129, 140] = value
    return layer, x, dy


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_results_are_not_finite_where_high_precision_is_not(name, operand, value) -> None:
    layer, x, dy = poisoned(operand, value, torch.bfloat16)
    expected = products(layer, x, dy)
    duotone.convert(layer, recipes.load(name), rules=())
    for step in range(2):  # delayed scales have met the value before the second one
        result = products(layer, x, dy)
        for which, want in expected.items():
            hidden = result[which].isfinite() & ~want.isfinite()
            assert not hidden.any(), f"step {step}: {int(hidden.sum())} elements of {which} are finite"


@pytest.mark.parametrize("name", ["fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes_keep_what_is_not_finite(name, dtype) -> None:
    for operand in OPERANDS:
        layer, x, dy = poisoned(operand, math.inf, dtype)
        expected = products(layer, x, dy)
        duotone.convert(layer, recipes.load(name), rules=())
        result = products(layer, x, dy)
        assert all(not result[which][~want.isfinite()].isfinite().any() for which, want in expected.items())


@pytest.mark.parametrize("name", QUANTIZED)
def test_large_values_that_saturate_stay_finite(name) -> None:
    layer, x, dy = poisoned("input", 3e30, torch.bfloat16)
    duotone.convert(layer, recipes.load(name), rules=())
    assert all(result.isfinite().all() for result in products(layer, x, dy).values())


SIZES = {"y": (1e37, 1e-37, 1e-3), "dx": (1e-3, 1e-37, 1e37), "dw": (1e-37, 1e-3, 1e37)}
"""The sizes of input, weight and gradient that make one product of a huge and a tiny operand."""


@pytest.mark.parametrize("way", ["eager", "compiled", "grouped"])
@pytest.mark.parametrize("which", SIZES)
@pytest.mark.parametrize("name", ["fp8-rowwise", "fp8-block", "fp8-current", "mxfp8"])
def test_a_huge_operand_beside_a_tiny_one_gives_the_finite_product(name, which, way) -> None:
    """A row of zeros in either stays zeros."""
    torch.manual_seed(0)
    x, w, dy = (
        torch.randn(n, k).clamp(-2, 2) * size
        for (n, k), size in zip(((M, K), (N, K), (M, N)), SIZES[which], strict=True)
    )
    x[3], w[5], dy[7], x[:, 9], dy[:, 11] = 0, 0, 0, 0, 0
    want = {"y": x @ w.t(), "dx": dy @ w, "dw": dy.t() @ x}[which]
    if way == "grouped":
        layer: nn.Module = duotone.GroupedLinear(1, K, N, bias=False, recipe=recipes.load(name))
        weight = layer.get_parameter("weight0")
    else:
        layer = duotone.convert(nn.Linear(K, N, bias=False), recipes.load(name), rules=())
        weight = layer.get_parameter("weight")
    weight.data.copy_(w)
    module = torch.compile(layer, backend="aot_eager", fullgraph=True) if way == "compiled" else layer
    x.requires_grad_()
    y = module(x, [M]) if way == "grouped" else module(x)
    y.backward(dy)
    result = {"y": y.detach(), "dx": x.grad, "dw": weight.grad}[which]
    assert result.isfinite().all() and (result[want == 0] == 0).all()
    assert (result - want).norm() <= 0.1 * want.norm()


@pytest.mark.parametrize("name", ["fp8-rowwise", "fp8-block", "mxfp8"])
def test_rows_with_a_scale_of_their_own_stay_as_they_were(name) -> None:
    """A sequence with a NaN changes no bit of another one's output and input gradient."""
    layer, x, dy = poisoned("input", math.inf, torch.bfloat16)
    clean = x.clone()
    clean[129, 140] = 1.0
    duotone.convert(layer, recipes.load(name), rules=())
    result, want = products(layer, x, dy), products(layer, clean, dy)
    assert torch.equal(result["y"][:129], want["y"][:129]) and torch.equal(result["dx"][:129], want["dx"][:129])


def test_other_experts_stay_as_they_were() -> None:
    """Each expert has scales of its own, also where the format scales whole tensors."""
    torch.manual_seed(0)
    experts = duotone.GroupedLinear(3, 64, 32, bias=False, recipe=recipes.load("nvfp4"))
    x = torch.randn(96, 64)
    want = experts(x, [32, 32, 32])
    x[40, 3] = math.nan
    duotone.load_rng_state(experts, {name: seed * 0 for name, seed in duotone.rng_state(experts).items()})
    result = experts(x, [32, 32, 32])
    assert not result[40].isfinite().any()
    assert torch.equal(result[:32], want[:32]) and torch.equal(result[64:], want[64:])


@pytest.mark.parametrize("name", QUANTIZED)
def test_finite_operands_have_the_same_bits_without_the_field(name) -> None:
    results = []
    for propagate in (True, False):
        layer, x, dy = poisoned("input", 2.0, torch.bfloat16)
        data = {**recipes.load(name).to_dict(), "propagate_nonfinite": propagate}
        duotone.convert(layer, recipes.from_dict(data), rules=())
        layer.get_buffer("duotone_seed").zero_()
        results.append(products(layer, x, dy))
    assert all(torch.equal(results[0][which], results[1][which]) for which in results[0])


@pytest.mark.parametrize("name", ["fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block"])
def test_the_field_hides_infinities(name) -> None:
    """The numerics of Transformer Engine: an infinity is the largest finite value of the element."""
    layer, x, dy = poisoned("input", math.inf, torch.bfloat16)
    data = {**recipes.load(name).to_dict(), "propagate_nonfinite": False}
    duotone.convert(layer, recipes.from_dict(data), rules=())
    assert all(result.isfinite().all() for result in products(layer, x, dy).values())


@pytest.mark.parametrize("name", ["fp8-rowwise", "nvfp4", "mxfp8"])
def test_quantized_weights_keep_what_is_written_into_them(name) -> None:
    """A NaN in a checkpoint does not vanish when it is loaded into planes."""
    with duotone.quantized_model_init(recipe=recipes.load(name)):
        layer = duotone.Linear(64, 32, bias=False, params_dtype=torch.bfloat16)
    values = torch.randn(32, 64)
    values[5, 7] = math.nan
    layer.load_state_dict({"weight": values}, strict=False)
    duotone.load_rng_state(layer, duotone.rng_state(layer))
    with duotone.autocast(recipe=recipes.load(name)):
        y = layer(torch.randn(16, 64, dtype=torch.bfloat16))
    assert not y[:, 5].isfinite().any()


@pytest.mark.parametrize("name", ["fp8-delayed", "fp8-block", "nvfp4"])
def test_grad_scaler_skips_a_step_that_overflowed(name) -> None:
    layer, x, dy = poisoned("grad_output", 1e4, torch.float32)
    duotone.convert(layer, recipes.load(name), rules=())
    before = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with torch.autocast("cpu", dtype=torch.float16):
        y = layer(x)
    scaler.scale((y.float() * dy).sum() * 60000.0).backward()  # 1.2e9, which fp16 does not hold
    assert not layer.get_parameter("weight").grad.isfinite().all()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(layer.weight.detach(), before) and scaler.get_scale() == 1.0


@pytest.mark.parametrize("name", ["fp8-delayed", "fp8-block", "nvfp4"])
def test_compiled_code_keeps_what_is_not_finite(name) -> None:
    layer, x, dy = poisoned("input", math.inf, torch.bfloat16)
    expected = products(layer, x, dy)
    duotone.convert(layer, recipes.load(name), rules=())
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    y = compiled(x.requires_grad_())
    y.backward(dy)
    result = {"y": y.detach().float(), "dx": x.grad.float(), "dw": layer.weight.grad.float()}
    assert all(not result[which][~want.isfinite()].isfinite().any() for which, want in expected.items())
