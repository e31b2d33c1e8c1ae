"""On a CUDA device: rotary embeddings by one kernel have the bits of torch's operations."""

import pytest
import torch
from torch import Tensor

from duotone.attention import RotaryPositionEmbedding, apply_rotary_pos_emb, rotary

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device; run `PYTHONPATH=src python -m pytest tests/gpu` on one",
)


def outcome(t: Tensor, angles: Tensor, layout: str, edges: Tensor | None) -> list[Tensor]:
    t = t.detach().requires_grad_()
    y = apply_rotary_pos_emb(t, angles, layout, edges)
    (dt,) = torch.autograd.grad(y, t, torch.sin(y.detach() * 3))
    return [y.detach(), dt]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("width", [128, 80])
def test_a_kernel_turns_heads_with_the_bits_of_torch(dtype, layout, width, monkeypatch) -> None:
    """Of queries that are views of one matrix."""
    lead = (130,) if layout == "thd" else (2, 65) if layout == "bshd" else (65, 2)
    t = torch.randn(*lead, 3, 6, width, device="cuda").to(dtype).select(len(lead), 1)
    angles = RotaryPositionEmbedding(width).cuda()(65)
    edges = torch.tensor([0, 60, 65, 130], device="cuda", dtype=torch.int32) if layout == "thd" else None
    by_kernel = outcome(t, angles, layout, edges)
    monkeypatch.setattr(rotary, "_fits", lambda t: False)
    for a, b in zip(by_kernel, outcome(t, angles, layout, edges), strict=True):
        assert torch.equal(a, b)


def test_second_derivatives_and_batched_gradients_follow() -> None:
    t = torch.randn(2, 8, 4, 64, device="cuda", requires_grad=True)
    angles = RotaryPositionEmbedding(64).cuda()(8)
    y = apply_rotary_pos_emb(t, angles, "bshd")
    (dt,) = torch.autograd.grad(y.square().sum(), t, create_graph=True)
    torch.testing.assert_close(dt, 2 * t)  # a turn keeps lengths
    (again,) = torch.autograd.grad(dt.square().sum(), t)
    torch.testing.assert_close(again, 8 * t)
    dy = torch.randn(3, *y.shape, device="cuda")
    (batched,) = torch.autograd.grad(apply_rotary_pos_emb(t, angles, "bshd"), t, dy, is_grads_batched=True)
    for one, of in zip(dy, batched, strict=True):
        torch.testing.assert_close(of, torch.autograd.grad(apply_rotary_pos_emb(t, angles, "bshd"), t, one)[0])
