"""The chunked head: torch's loss and gradients, and the logits of one chunk at a time."""

import pytest
import torch
import torch.nn.functional as F

from bench.subjects import head
from duotone_lab.memory.storages import LiveStorages, total_bytes

TOKENS, WIDTH, VOCABULARY = 40, 24, 96


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(head, "CHUNK", 16)  # the last one has 8


def inputs(dtype, tokens=TOKENS):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, WIDTH, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    return x, weight, torch.randint(VOCABULARY, (tokens,), generator=draw)


def in_double(logits, targets):
    return F.cross_entropy(logits, targets, reduction="sum")


def gradients(loss, *leaves):
    return torch.autograd.grad(3 * loss, leaves)


@pytest.mark.parametrize(
    ("dtype", "loss", "tolerance"), [(torch.float64, in_double, 1e-14), (torch.float32, head.cross_entropy, 2e-6)]
)
@pytest.mark.parametrize("tokens", [TOKENS, 32, 5])
def test_loss_and_gradients_are_torchs(dtype, loss, tolerance, tokens):
    x, weight, targets = inputs(dtype, tokens)
    result = head.mean_loss(x, weight, targets, loss)
    expected = F.cross_entropy(x @ weight.t(), targets)
    assert result.dtype == dtype
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=0)
    for gradient, reference in zip(gradients(result, x, weight), gradients(expected, x, weight), strict=True):
        torch.testing.assert_close(gradient, reference, rtol=tolerance, atol=tolerance)


def test_in_bf16_the_loss_is_fp32_and_gradients_are_within_roundings():
    x, weight, targets = inputs(torch.bfloat16)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    result = head.mean_loss(x, weight, targets)
    expected = F.cross_entropy(exact[0] @ exact[1].t(), targets)
    assert result.dtype == torch.float32 and result.item() == pytest.approx(expected.item(), rel=2e-3)
    for gradient, reference in zip(gradients(result, x, weight), gradients(expected, *exact), strict=True):
        assert gradient.dtype == torch.bfloat16
        assert (gradient.double() - reference).norm() < 0.01 * reference.norm()


def test_a_second_backward_is_refused():
    x, weight, targets = inputs(torch.float32)
    loss = head.mean_loss(x, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_step_holds_one_chunks_logits_and_the_gradients_once():
    tokens = 512
    x, weight, targets = inputs(torch.bfloat16, tokens)
    with LiveStorages([x, weight, targets]) as live:
        before = live.live
        head.mean_loss(x, weight, targets).backward()
    chunk = head.CHUNK * VOCABULARY * 4
    assert total_bytes([x.grad, weight.grad]) == x.nbytes + weight.nbytes
    assert live.peak - before < x.nbytes + weight.nbytes + 4 * chunk < tokens * VOCABULARY * 2
