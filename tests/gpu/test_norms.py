"""On a CUDA device: norms made by kernels are those of float64, in forward and backward, and leave no row out."""

import pytest
import torch
from torch import Tensor

from duotone.dispatch.norms import NORMS

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device; run `PYTHONPATH=src python -m pytest tests/gpu` on one",
)
EPS = 1e-5
SHAPES = [(64, 256), (33, 72), (5, 1000), (300, 4096), (2, 3, 96), (7, 16384)]


def exact(kind: str, x: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    """In float64."""
    centred = x - x.mean(-1, keepdim=True) if kind == "LayerNorm" else x
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS) * gamma
    return y if beta is None else y + beta


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms_are_those_of_float64(kind, shape, dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    x, dy = (torch.randn(*shape, device="cuda", generator=generator).to(dtype) for _ in range(2))
    x = x * 3 + 1
    gamma = (1 + torch.randn(shape[-1], device="cuda", generator=generator) / 4).to(dtype)
    beta = torch.randn(shape[-1], device="cuda", generator=generator).to(dtype) if kind == "LayerNorm" else None
    y, *saved = NORMS[kind].forward(x, gamma, beta, EPS)
    got = NORMS[kind].backward(dy, x, gamma, beta, saved, (True, True, beta is not None))
    leaves = [t.double().requires_grad_() for t in (x, gamma, *([] if beta is None else [beta]))]
    want = exact(kind, leaves[0], leaves[1], None if beta is None else leaves[2])
    gradients = torch.autograd.grad(want, leaves, dy.double())
    # One rounding to the dtype, and fp32 sums over a row or over the rows.
    step, rows = torch.finfo(dtype).eps, x.numel() // shape[-1]
    assert y.dtype is dtype and y.shape == x.shape
    torch.testing.assert_close(y.double(), want.detach(), rtol=step, atol=step + 1e-5)
    torch.testing.assert_close(got[0].double(), gradients[0], rtol=2 * step, atol=step + 1e-4)
    for made, right in zip(got[1:], gradients[1:], strict=False):
        assert made.dtype is dtype
        torch.testing.assert_close(made.double(), right, rtol=step, atol=1e-5 * rows**0.5 * 8 + step)


def test_only_the_gradients_that_are_asked_for_are_made() -> None:
    x, gamma = torch.randn(8, 64, device="cuda"), torch.ones(64, device="cuda")
    _, *saved = NORMS["LayerNorm"].forward(x, gamma, gamma, EPS)
    dx, dgamma, dbeta = NORMS["LayerNorm"].backward(x, x, gamma, gamma, saved, (True, False, True))
    assert dx is not None and dgamma is None and dbeta is not None
