"""LayerNorm, RMSNorm and L2 normalisation over the last dimension.

`forward(x, gamma, beta, eps)` gives y and what backward needs, `backward(dy, x, gamma, beta, saved, needs)` the three
gradients, both with torch's operations and bits. `replay` is y in operations that autograd differentiates any number
of times. `produced` and `backward_of_produced` use kernels, for a norm that a cast kernel computes: outside of traced
code on CUDA, for rows of at most WIDEST columns. They also compute in fp32 and round once, but sum in another order.
A result next to a tie may therefore round to the other neighbour.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.allocate import is_aligned
from duotone.dispatch.casts import PLAIN_TYPES, has_kernels

if TYPE_CHECKING:
    from duotone.kernels.activations import FusedProducer

Weight = Tensor | None
Saved = Sequence[Tensor]
"""The tensors of forward for backward: mean and 1/std of LayerNorm, only 1/std of others."""
Needs = Sequence[bool]
"""Which of the gradients of x, gamma and beta are needed."""
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]

aten = torch.ops.aten
WIDEST = 8192
"""Columns of a row that a program holds without spilling, in forward and backward."""
WORDS = 16
"""Rows have a multiple of so many elements, and addresses of so many bytes: then all kernels sum in one order."""


class RowNorm:
    """A norm of rows. `centred`: the mean is subtracted."""

    centred: bool

    def forward(self, x: Tensor, gamma: Weight, beta: Weight, eps: float) -> tuple[Tensor, ...]:
        """y (*lead, N), then the statistics that backward needs, fp32 (*lead, 1)."""
        raise NotImplementedError

    def backward(self, dy: Tensor, x: Tensor, gamma: Weight, beta: Weight, saved: Saved, needs: Needs) -> Gradients:
        """The gradients of x, gamma and beta. None for those that `needs` leaves out."""
        raise NotImplementedError

    def produced(self, x: Tensor, gamma: Weight, beta: Weight, eps: float, *saved: Tensor) -> "FusedProducer | None":
        """y as a `kernels.activations.FusedProducer`, or None. Its `saved` are known once it is encoded.

        With the `saved` of an earlier encoding, nothing is measured again.
        """
        if not _fits(x, gamma, beta) or x.shape[-1] % WORDS:
            return None
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        if not is_aligned(flat, WORDS):
            return None
        from duotone.kernels import activations
        from duotone.kernels.norms import Norm

        return activations.normalised(Norm(flat, gamma, beta, eps, self.centred, x.shape[:-1], saved))

    def backward_of_produced(
        self, dy: Tensor, x: Tensor, gamma: Weight, beta: Weight, saved: Saved, needs: Needs
    ) -> Gradients:
        """The gradients by kernels, else by `backward`."""
        if not (_fits(x, gamma, beta) and has_kernels(dy) and dy.dtype is x.dtype):
            return self.backward(dy, x, gamma, beta, saved, needs)
        from duotone.kernels import norms

        of_dy, of_x = (t.reshape(-1, t.shape[-1]).contiguous() for t in (dy, x))
        mean = saved[0] if self.centred else None
        outputs = needs[0], gamma is not None and bool(needs[1]), beta is not None and bool(needs[2])
        dx, dgamma, dbeta = norms.backward(of_dy, of_x, gamma, mean, saved[-1], outputs)
        return None if dx is None else dx.view(x.shape), dgamma, dbeta


class LayerNormKernel(RowNorm):
    """y = (x - mean) / sqrt(var + eps) * gamma + beta."""

    centred = True

    def forward(self, x: Tensor, gamma: Weight, beta: Weight, eps: float) -> tuple[Tensor, ...]:
        return aten.native_layer_norm(x, [x.shape[-1]], gamma, beta, eps)

    def replay(self, x: Tensor, gamma: Weight, beta: Weight, eps: float) -> Tensor:
        """y in operations that autograd differentiates."""
        return F.layer_norm(x, x.shape[-1:], gamma, beta, eps)

    def backward(self, dy: Tensor, x: Tensor, gamma: Weight, beta: Weight, saved: Saved, needs: Needs) -> Gradients:
        mask = [needs[0], bool(needs[1]), bool(needs[2])]
        return aten.native_layer_norm_backward(dy, x, [x.shape[-1]], *saved, gamma, beta, mask)


class RMSNormKernel(RowNorm):
    """y = x / sqrt(mean(x^2) + eps) * gamma, in fp32."""

    centred = False

    def forward(self, x: Tensor, gamma: Weight, beta: Weight, eps: float) -> tuple[Tensor, ...]:
        return aten._fused_rms_norm(x, [x.shape[-1]], gamma, eps)

    def replay(self, x: Tensor, gamma: Weight, beta: Weight, eps: float) -> Tensor:
        """y in operations that autograd differentiates."""
        wide = widened(x)
        y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (y if gamma is None else y * gamma).to(x.dtype)

    def backward(self, dy: Tensor, x: Tensor, gamma: Weight, beta: Weight, saved: Saved, needs: Needs) -> Gradients:
        """torch's fused kernel on CUDA, elsewhere the operations that autograd would run."""
        (rms,) = saved
        if dy.device.type == "cuda":
            dx, dgamma = aten._fused_rms_norm_backward(dy, x, [x.shape[-1]], rms, gamma, [needs[0], bool(needs[1])])
            return dx, dgamma, None
        wide, grad = widened(x), widened(dy)
        dgamma = grad * (wide * rms) if gamma is not None and needs[1] else None
        if dgamma is not None and x.dim() > 1:
            dgamma = dgamma.sum(list(range(x.dim() - 1)))
        if not needs[0]:
            return None, dgamma, None
        grad = grad if gamma is None else grad * gamma
        inner = -0.5 * (grad * wide).sum(-1, keepdim=True) * rms.pow(3)
        dx = grad * rms + inner.expand(x.shape) / x.shape[-1] * (2 * wide)
        return dx.to(x.dtype), dgamma, None


def _fits(x: Tensor, gamma: Weight, beta: Weight) -> bool:
    """Whether kernels take x and these parameters; they read a beta only behind a gamma."""
    if not has_kernels(x) or x.shape[-1] > WIDEST or (gamma is None and beta is not None):
        return False
    return all(p is None or _is_like(p, x) for p in (gamma, beta))


def _is_like(p: Tensor, x: Tensor) -> bool:
    """Whether a kernel for x can read the parameter."""
    same = type(p) in PLAIN_TYPES and p.dtype is x.dtype and p.device == x.device
    return same and p.shape == x.shape[-1:] and p.is_contiguous()


def widened(x: Tensor) -> Tensor:
    """In fp32, or in float64 where it is that."""
    return x if x.dtype is torch.float64 else x.to(torch.float32)


class L2Kernel:
    """y = x / sqrt(sum(x^2) + eps), in fp32, without parameters."""

    def forward(self, x: Tensor, gamma: Weight, beta: Weight, eps: float) -> tuple[Tensor, ...]:
        wide = widened(x)
        scale = torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)
        return (wide * scale).to(x.dtype), scale

    def replay(self, x: Tensor, gamma: Weight, beta: Weight, eps: float) -> Tensor:
        """y in operations that autograd differentiates."""
        return self.forward(x, gamma, beta, eps)[0]

    def produced(self, x: Tensor, gamma: Weight, beta: Weight, eps: float, *saved: Tensor) -> "FusedProducer | None":
        """None: no kernel computes this norm."""
        return None

    def backward(self, dy: Tensor, x: Tensor, gamma: Weight, beta: Weight, saved: Saved, needs: Needs) -> Gradients:
        (scale,) = saved
        wide, grad = widened(x), widened(dy)
        along = (grad * wide).sum(-1, keepdim=True) * scale.square()
        return ((grad - wide * along) * scale).to(x.dtype), None, None

    backward_of_produced = backward


NormKernel = LayerNormKernel | RMSNormKernel | L2Kernel
NORMS: dict[str, NormKernel] = {
    "LayerNorm": LayerNormKernel(),
    "RMSNorm": RMSNormKernel(),
    "L2Normalization": L2Kernel(),
}
