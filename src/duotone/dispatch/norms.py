"""LayerNorm, RMSNorm and L2 normalisation over the last dimension, with torch's own arithmetic and rounding.

`forward(x, gamma, beta, eps)` gives y and what backward needs; `backward(dy, x, gamma, beta, saved, needs)` the three
gradients.
"""

from typing import Any

import torch
from torch import Tensor

from duotone.dispatch.casts import has_kernels

aten = torch.ops.aten


class LayerNormKernel:
    """y = (x - mean) / sqrt(var + eps) * gamma + beta."""

    def forward(self, x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float) -> tuple[Tensor, ...]:
        if _fits(x, gamma, beta):
            return _normalised(x, gamma, beta, eps, centred=True)
        return aten.native_layer_norm(x, [x.shape[-1]], gamma, beta, eps)

    def backward(self, dy: Tensor, x: Tensor, gamma: Any, beta: Any, saved: Any, needs: Any) -> tuple[Any, ...]:
        if _fits(x, gamma, beta) and dy.dtype is x.dtype:
            return _differentiated(dy, x, gamma, beta, *saved, needs)
        mask = [needs[0], bool(needs[1]), bool(needs[2])]
        return aten.native_layer_norm_backward(dy, x, [x.shape[-1]], *saved, gamma, beta, mask)


class RMSNormKernel:
    """y = x / sqrt(mean(x^2) + eps) * gamma, in fp32."""

    def forward(self, x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float) -> tuple[Tensor, ...]:
        if _fits(x, gamma, None):
            return _normalised(x, gamma, None, eps, centred=False)
        return aten._fused_rms_norm(x, [x.shape[-1]], gamma, eps)

    def backward(self, dy: Tensor, x: Tensor, gamma: Any, beta: Any, saved: Any, needs: Any) -> tuple[Any, ...]:
        """On CUDA a fused kernel; elsewhere, where there is none, the operations that autograd would run."""
        (rms,) = saved
        if _fits(x, gamma, None) and dy.dtype is x.dtype:
            return _differentiated(dy, x, gamma, None, None, rms, needs)
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


WIDEST = 8192
"""Columns that a program holds without spilling."""


def _fits(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether one kernel normalises x."""
    return has_kernels(x) and x.shape[-1] <= WIDEST and all(p is None or p.is_contiguous() for p in parameters)


def _normalised(x: Tensor, gamma: Any, beta: Any, eps: float, centred: bool) -> tuple[Tensor, ...]:
    from duotone.kernels import norms

    y, mean, rstd = norms.forward(x.reshape(-1, x.shape[-1]).contiguous(), gamma, beta, eps, centred)
    rows = (*x.shape[:-1], 1)
    saved = [rstd.view(rows)] if mean is None else [mean.view(rows), rstd.view(rows)]
    return y.view(x.shape), *saved


def _differentiated(
    dy: Tensor, x: Tensor, gamma: Any, beta: Any, mean: Tensor | None, rstd: Tensor, needs: Any
) -> tuple[Any, ...]:
    from duotone.kernels import norms

    flat = [t.reshape(-1, t.shape[-1]).contiguous() for t in (dy, x)]
    wanted = gamma is not None and bool(needs[1]), beta is not None and bool(needs[2])
    dx, dgamma, dbeta = norms.backward(*flat, gamma, mean, rstd, wanted)
    return (
        dx.view(x.shape) if needs[0] else None,
        None if dgamma is None else dgamma.to(gamma.dtype),
        None if dbeta is None else dbeta.to(beta.dtype),
    )


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
