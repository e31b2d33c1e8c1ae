"""The head of a language model and its cross entropy, some tokens at a time: the logits of all never exist."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 2048
"""Tokens whose logits exist at once: enough for products that fill a GPU, few enough that blocks decide the peak."""

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross entropies of tokens, summed in fp32: logits (tokens, vocabulary), targets int64 (tokens,)."""
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def mean_loss(x: Tensor, weight: Tensor, targets: Tensor, loss: Loss = cross_entropy) -> Tensor:
    """The mean cross entropy: x (tokens, width), weight (vocabulary, width), targets int64 (tokens,).

    `loss` is `cross_entropy` or a compiled form of it.
    """
    return HeadLoss.apply(x, weight, targets, loss) / len(targets)  # type: ignore[operator]


class HeadLoss(torch.autograd.Function):
    """The summed loss. Forward makes the gradients, as only there a chunk's logits exist; backward scales them.

    That of the weight adds up in the weight's dtype, at one rounding a chunk. It lives through the peak of a step, and
    in fp32 would take twice the memory of a bf16 weight (512 MiB at 32768 x 4096), and more while it is cast.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, loss: Loss) -> Tensor:
        dx, dw = torch.empty_like(x), torch.zeros_like(weight)
        chunks = zip(x.split(CHUNK), targets.split(CHUNK), dx.split(CHUNK), strict=True)
        losses = [differentiate(rows, weight, labels, loss, into, dw) for rows, labels, into in chunks]
        ctx.save_for_backward(dx, dw)
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        dx, dw = ctx.saved_tensors
        return dx.mul_(gradient), dw.mul_(gradient), None, None  # in place, so a second backward is refused


def differentiate(x: Tensor, weight: Tensor, targets: Tensor, loss: Loss, dx: Tensor, dw: Tensor) -> Tensor:
    """The loss of one chunk; the gradient of x is written to `dx`, that of the weight added to `dw`."""
    logits = (x @ weight.t()).requires_grad_()
    with torch.enable_grad():
        value = loss(logits, targets)
    (dlogits,) = torch.autograd.grad(value, logits)
    torch.mm(dlogits, weight, out=dx)
    dw.addmm_(dlogits.t(), x)
    return value.detach()
