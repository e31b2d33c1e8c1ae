"""On CUDA: second derivatives, and checkpoints whose recompute runs on a thread of autograd's engine."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import duotone
from duotone import recipes
from duotone.errors import UserError
from duotone.modules import LayerNormMLP

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device; run `PYTHONPATH=src python -m pytest tests/gpu` on one",
)


def penalty(f, inputs: list[Tensor]) -> list[Tensor]:
    first = torch.autograd.grad(f(inputs[0]).float().pow(3).sum(), inputs, create_graph=True)
    return list(torch.autograd.grad(sum(g.float().square().sum() for g in first), inputs, allow_unused=True))


def test_a_gradient_penalty_in_high_precision_is_torchs() -> None:
    """fp32 with fp32 products: sums of 64 and 96 terms in another order, cubed and squared."""
    m = LayerNormMLP(64, 96, activation="swiglu", params_dtype=torch.float32, device="cuda")

    def plain(x: Tensor) -> Tensor:
        h = F.linear(F.layer_norm(x, (64,), m.layer_norm_weight, m.layer_norm_bias), m.fc1.weight, m.fc1.bias)
        a, b = h.chunk(2, -1)
        return F.linear(F.silu(a) * b, m.fc2.weight, m.fc2.bias)

    inputs = [torch.randn(32, 64, device="cuda", requires_grad=True), *m.parameters()]
    for result, want in zip(penalty(m, inputs), penalty(plain, inputs), strict=True):
        assert (result is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(result, want, rtol=1e-3, atol=1e-3 * want.abs().max().item())


@pytest.mark.parametrize("name", ["fp8-current", "fp8-block", "mxfp8", "nvfp4"])
def test_a_second_derivative_of_quantized_operands_is_an_error(name: str) -> None:
    m = duotone.Linear(256, 256, params_dtype=torch.bfloat16, device="cuda", recipe=recipes.load(name))
    x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (g,) = torch.autograd.grad(m(x).float().sum(), x, create_graph=True)
    with pytest.raises(UserError, match="no second derivative"):
        g.float().square().sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["nvfp4", "fp8-current"])
def test_microbatches_in_flight_under_a_checkpoint_change_no_bit(name: str, reentrant: bool) -> None:
    def steps(run) -> list[Tensor]:
        torch.manual_seed(3)
        m = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).to("cuda", torch.bfloat16)
        duotone.convert(m, recipes.load(name), ())
        leaves = [torch.randn(256, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        losses = [run(m, leaf).float().square().sum() for leaf in leaves]
        for i in (1, 0, 2):
            losses[i].backward()
        return [*[leaf.grad for leaf in leaves], *[p.grad for p in m.parameters()], *[b.clone() for b in m.buffers()]]

    result = steps(lambda m, x: checkpoint(m, x, use_reentrant=reentrant))
    assert all(torch.equal(a, b) for a, b in zip(result, steps(lambda m, x: m(x)), strict=True))
