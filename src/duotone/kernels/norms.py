"""LayerNorm and RMSNorm of contiguous rows (M, K) and their gradients, in fp32 inside; a row lies within one program."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from duotone.kernels.launch import Launch, kernel

PARTIALS = 264
"""Programs of a backward, each of which leaves one partial sum of the parameters' gradients."""


@triton.jit
def _parameter(pointer, k, K, neutral, GIVEN: tl.constexpr):
    if GIVEN:
        made = tl.load(pointer + k, mask=k < K, other=0.0).to(tl.float32)
    else:
        made = tl.zeros_like(k).to(tl.float32) + neutral
    return made


@kernel
def norm_kernel(
    x, gamma, beta, y, mean, rstd, K, eps,
    CENTRED: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr, TK: tl.constexpr,
):  # fmt: skip
    """y = (x - mean) rstd gamma + beta of one row; without the mean where not CENTRED."""
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, TK)
    inside = k < K
    value = tl.load(x + row * K + k, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        middle = tl.sum(value, axis=0) / K
        tl.store(mean + row, middle)
        value = tl.where(inside, value - middle, 0.0)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / K + eps)
    tl.store(rstd + row, scale)
    made = value * scale * _parameter(gamma, k, K, 1.0, GAMMA) + _parameter(beta, k, K, 0.0, BETA)
    tl.store(y + row * K + k, made.to(y.dtype.element_ty), mask=inside)


@kernel
def norm_gradient_kernel(
    dy, x, gamma, mean, rstd, dx, dgamma, dbeta, M, K,
    CENTRED: tl.constexpr, GAMMA: tl.constexpr, DGAMMA: tl.constexpr, DBETA: tl.constexpr, TK: tl.constexpr,
):  # fmt: skip
    """dx of every P-th row, and partial sums over them of the gradients of gamma and beta."""
    k = tl.arange(0, TK)
    inside = k < K
    weight = _parameter(gamma, k, K, 1.0, GAMMA)
    of_gamma, of_beta = tl.zeros([TK], tl.float32), tl.zeros([TK], tl.float32)
    for i in range(tl.program_id(0), M, tl.num_programs(0)):
        row = i.to(tl.int64)
        value = tl.load(x + row * K + k, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(dy + row * K + k, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row)
        if CENTRED:
            value = tl.where(inside, value - tl.load(mean + row), 0.0)
        value = value * scale
        if DGAMMA:
            of_gamma += grad * value
        if DBETA:
            of_beta += grad
        grad = grad * weight
        made = grad - value * (tl.sum(grad * value, axis=0) / K)
        if CENTRED:
            made -= tl.sum(grad, axis=0) / K
        tl.store(dx + row * K + k, (made * scale).to(dx.dtype.element_ty), mask=inside)
    if DGAMMA:
        tl.store(dgamma + tl.program_id(0) * K + k, of_gamma, mask=inside)
    if DBETA:
        tl.store(dbeta + tl.program_id(0) * K + k, of_beta, mask=inside)


def forward(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y in x's dtype, mean (None unless centred) and 1/sqrt(var + eps), fp32 (M,)."""
    m, k = x.shape
    y = torch.empty_like(x)
    mean = torch.empty(m, dtype=torch.float32, device=x.device) if centred else None
    rstd = torch.empty(m, dtype=torch.float32, device=x.device)
    _forward(centred, gamma is not None, beta is not None, k)(m, (x, gamma, beta, y, mean, rstd), (k,), (eps,))
    return y, mean, rstd


def backward(
    dy: Tensor, x: Tensor, gamma: Tensor | None, mean: Tensor | None, rstd: Tensor, needs: tuple[bool, bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx in x's dtype; the gradients of gamma and beta, fp32 (K,), where `needs` says so."""
    m, k = x.shape
    dx = torch.empty_like(x)
    programs = min(m, PARTIALS)
    partial = [torch.empty((programs, k), dtype=torch.float32, device=x.device) if need else None for need in needs]
    launch = _backward(mean is not None, gamma is not None, *needs, k)
    launch(programs, (dy, x, gamma, mean, rstd, dx, *partial), (m, k))
    sums = [None if one is None else one.sum(0) for one in partial]
    return dx, sums[0], sums[1]


def _width(k: int) -> tuple[int, int]:
    """Columns of a program, a power of two, and warps."""
    columns = 1 << (k - 1).bit_length()
    return columns, min(max(columns // 1024, 1), 16)


@functools.cache
def _forward(centred: bool, gamma: bool, beta: bool, k: int) -> Launch:
    columns, warps = _width(k)
    return norm_kernel.bind({"CENTRED": centred, "GAMMA": gamma, "BETA": beta, "TK": columns}, warps)


@functools.cache
def _backward(centred: bool, gamma: bool, dgamma: bool, dbeta: bool, k: int) -> Launch:
    columns, warps = _width(k)
    constants = {"CENTRED": centred, "GAMMA": gamma, "DGAMMA": dgamma, "DBETA": dbeta, "TK": columns}
    return norm_gradient_kernel.bind(constants, min(2 * warps, 16))
