"""LayerNorm, RMSNorm and L2 normalisation over the last dimension, with torch's own arithmetic and rounding.

`forward(x, gamma, beta, eps)` gives y and what backward needs; `backward(dy, x, gamma, beta, saved, needs)` the three
gradients.
"""

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


class LayerNormKernel:
    """y = (x - mean) / sqrt(var + eps) * gamma + beta."""

    def forward(self, x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float) -> tuple[Tensor, ...]:
        return aten.native_layer_norm(x, [x.shape[-1]], gamma, beta, eps)

    def backward(self, dy: Tensor, x: Tensor, gamma: Any, beta: Any, saved: Any, needs: Any) -> tuple[Any, ...]:
        mask = [needs[0], bool(needs[1]), bool(needs[2])]
        return aten.native_layer_norm_backward(dy, x, [x.shape[-1]], *saved, gamma, beta, mask)


class RMSNormKernel:
    """y = x / sqrt(mean(x^2) + eps) * gamma, in fp32."""

    def forward(self, x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float) -> tuple[Tensor, ...]:
        return aten._fused_rms_norm(x, [x.shape[-1]], gamma, eps)

    def backward(self, dy: Tensor, x: Tensor, gamma: Any, beta: Any, saved: Any, needs: Any) -> tuple[Any, ...]:
        """On CUDA torch's fused kernel; elsewhere, where there is none, the operations that autograd would run."""
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


def widened(x: Tensor) -> Tensor:
    """In fp32, or in float64 where it is that."""
    return x if x.dtype is torch.float64 else x.to(torch.float32)


class L2Kernel:
    """y = x / sqrt(sum(x^2) + eps), in fp32, without parameters."""

    def forward(self, x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float) -> tuple[Tensor, ...]:
        wide = widened(x)
        scale = torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)
        return (wide * scale).to(x.dtype), scale

    def backward(self, dy: Tensor, x: Tensor, gamma: Any, beta: Any, saved: Any, needs: Any) -> tuple[Any, ...]:
        (scale,) = saved
        wide, grad = widened(x), widened(dy)
        along = (grad * wide).sum(-1, keepdim=True) * scale.square()
        return ((grad - wide * along) * scale).to(x.dtype), None, None


NORMS: dict[str, Any] = {"LayerNorm": LayerNormKernel(), "RMSNorm": RMSNormKernel(), "L2Normalization": L2Kernel()}
