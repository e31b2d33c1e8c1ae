"""LayerNorm and RMSNorm of contiguous rows (M, K) and their gradients, in fp32; a row lies within one program.

A cast may also compute a norm, from its statistics. Both use the arithmetic of `affine` and the sums of one kernel, so
both round alike.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from duotone.kernels.amax import nan_to_zero
from duotone.kernels.launch import Launch, kernel
from duotone.kernels.values import affine, wide

SUMS = 264 * 4096
"""Elements of the partial sums that a backward leaves for a parameter's gradient. Each program leaves one row; with
rows of 4096 there are two programs a multiprocessor."""
FOLD = (128, 32)
"""Partial sums and columns that a program adds up at a time."""
IN_FLIGHT = 65536
"""The most bytes of x and dy that a backward program reads ahead into shared memory."""


@functools.partial(kernel, any_alignment=("live",))
def norm_kernel(x, gamma, beta, y, mean, rstd, live, K, eps, TK: tl.constexpr):
    """mean, unless None, and rstd of one row. The norm goes into y and its amax into `live`, unless these are None."""
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, TK)
    inside = k < K
    value = wide(x + row * K, k, inside)
    if mean is not None:
        middle = tl.sum(value, axis=0) / K
        tl.store(mean + row, middle)
        value = tl.where(inside, value - middle, 0.0)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / K + eps)
    tl.store(rstd + row, scale)
    if y is not None or live is not None:
        result = affine(value, scale, wide(gamma, k, inside), wide(beta, k, inside)).to(x.dtype.element_ty)
        if y is not None:
            tl.store(y + row * K + k, result, mask=inside)
        if live is not None:  # most rows read a larger one
            largest = nan_to_zero(tl.max(tl.abs(result.to(tl.float32)), axis=0)).to(tl.int32, bitcast=True)
            tl.atomic_max(live, largest, mask=largest > tl.load(live), sem="relaxed")


@triton.jit
def _slope(grad, value, weight, K, CENTRED: tl.constexpr):
    """dx / rstd of a row, from dy, its normalised values and gamma, None for ones."""
    if weight is not None:
        grad = grad * weight
    result = grad - value * (tl.sum(grad * value, axis=0) / K)
    if CENTRED:
        result -= tl.sum(grad, axis=0) / K
    return result


@kernel
def norm_gradient_kernel(
    dy, x, gamma, mean, rstd, dx, partial, M, K,
    DGAMMA: tl.constexpr, DBETA: tl.constexpr, TK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx of every P-th row. Sums over these rows, for gamma then beta if needed, are one row each of (1 or 2, P, K)."""
    k = tl.arange(0, TK)
    inside = k < K
    weight = wide(gamma, k, inside)
    of_gamma, of_beta = tl.zeros([TK], tl.float32), tl.zeros([TK], tl.float32)
    scale, middle = tl.load(rstd + tl.program_id(0)), 0.0
    if mean is not None:
        middle = tl.load(mean + tl.program_id(0))
    for i in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=STAGES):
        row, after = tl.cast(i, tl.int64), i + tl.num_programs(0)
        value, grad = wide(x + row * K, k, inside), wide(dy + row * K, k, inside)
        later = tl.load(rstd + after, mask=after < M, other=0.0)  # of the next row, so that no program waits for it
        if mean is not None:
            value = tl.where(inside, value - middle, 0.0)
            middle = tl.load(mean + after, mask=after < M, other=0.0)
        value = value * scale
        if DGAMMA:
            of_gamma += grad * value
        if DBETA:
            of_beta += grad
        if dx is not None:
            result = (_slope(grad, value, weight, K, mean is not None) * scale).to(dx.dtype.element_ty)
            tl.store(dx + row * K + k, result, mask=inside)
        scale = later
    place = tl.program_id(0) * K + k
    if DGAMMA:
        tl.store(partial + place, of_gamma, mask=inside)
        place += tl.num_programs(0) * K
    if DBETA:
        tl.store(partial + place, of_beta, mask=inside)


@functools.partial(kernel, unspecialized=("P",))
def fold_kernel(out, partial, P, K, TP: tl.constexpr, TK: tl.constexpr):
    """(S, P, K) -> (S, K), summed over P."""
    across = tl.cdiv(K, TK)
    which, p = tl.program_id(0) // across, tl.arange(0, TP)[:, None]
    k = (tl.program_id(0) % across) * TK + tl.arange(0, TK)
    total = tl.zeros([TP, TK], tl.float32)
    for start in range(0, P, TP):
        at = (which * P + start + p) * K + k[None, :]
        total += tl.load(partial + at, mask=(start + p < P) & (k[None, :] < K), other=0.0)
    tl.store(out + which * K + k, tl.sum(total, axis=0).to(out.dtype.element_ty), mask=k < K)


class Norm:
    """The norm of contiguous x (M, K), not computed yet; gamma and beta are (K,) in x's dtype, or None.

    `mean` and `rstd` = 1/sqrt(var + eps) are fp32 (*lead, 1) for an x of (*lead, K). They are known once the norm was
    computed or measured, or come from `saved`. `mean` is None unless `centred`.
    """

    def __init__(
        self,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        eps: float,
        centred: bool,
        lead: tuple[int, ...],
        saved: tuple[Tensor, ...] = (),
    ) -> None:
        self.x, self.gamma, self.beta, self.eps, self.centred, self.lead = x, gamma, beta, eps, centred, lead
        self.mean: Tensor | None = saved[0] if centred and saved else None
        self.rstd: Tensor | None = saved[-1] if saved else None

    @property
    def variant(self) -> int:
        """Which of mean, gamma and beta exist. A kernel is compiled for that."""
        return self.centred + 2 * (self.gamma is not None) + 4 * (self.beta is not None)

    @property
    def saved(self) -> tuple[Tensor | None, ...]:
        """What backward needs."""
        return (self.mean, self.rstd) if self.centred else (self.rstd,)

    def make(self) -> Tensor:
        """(M, K) in x's dtype."""
        y = torch.empty_like(self.x)
        self._launch(y, None)
        return y

    def measure(self) -> None:
        """Compute only the statistics, unless they are known."""
        if self.rstd is None:
            self._launch(None, None)

    def measure_amax(self) -> Tensor:
        """Compute the statistics. Returns the amax of the norm, fp32 (1,), in which NaN counts as 0."""
        bits = torch.zeros(1, dtype=torch.int32, device=self.x.device)
        self._launch(None, bits)
        return bits.view(torch.float32)

    def _launch(self, y: Tensor | None, live: Tensor | None) -> None:
        m, k = self.x.shape
        shape, device = (*self.lead, 1), self.x.device
        self.rstd = torch.empty(shape, dtype=torch.float32, device=device)
        if self.centred:
            self.mean = torch.empty(shape, dtype=torch.float32, device=device)
        tensors = (self.x, self.gamma, self.beta, y, self.mean, self.rstd, live)
        _forward(*_width(k), self.variant, y is not None, live is not None)(m, tensors, (k,), (self.eps,))


def backward(
    dy: Tensor,
    x: Tensor,
    gamma: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, gamma and beta that `needs` names, in x's dtype; dy and x contiguous (M, K)."""
    m, k = x.shape
    needs_dx, *needs_sums = needs
    dx = torch.empty_like(x) if needs_dx else None
    columns, warps = _width(k)
    count, programs = sum(needs_sums), min(m, SUMS // columns)
    partial = torch.empty((count, programs, k), dtype=torch.float32, device=x.device) if count else None
    stages = 1 + max(1, IN_FLIGHT // (2 * k * x.element_size()))
    present = gamma is not None, mean is not None
    launch = _backward(columns, warps, min(stages, 3), needs, present)
    launch(programs, (dy, x, gamma, mean, rstd, dx, partial), (m, k))
    if partial is None:
        return dx, None, None
    out = torch.empty((count, k), dtype=x.dtype, device=x.device)
    _FOLD(count * -(-k // FOLD[1]), (out, partial), (programs, k))
    sums = iter(out.unbind())
    dgamma, dbeta = (next(sums) if need else None for need in needs_sums)
    return dx, dgamma, dbeta


_FOLD = fold_kernel.bind({"TP": FOLD[0], "TK": FOLD[1]})


def _width(k: int) -> tuple[int, int]:
    """Columns of a program, a power of two, and warps: a thread holds 32 elements."""
    columns = 1 << (k - 1).bit_length()
    return columns, max(columns // 1024, 1)


@functools.cache
def _forward(columns: int, warps: int, variant: int, makes: bool, records: bool) -> Launch:
    """The last three arguments say which tensors exist. There is a launch for each choice."""
    return norm_kernel.bind({"TK": columns}, warps)


@functools.cache
def _backward(columns: int, warps: int, stages: int, needs: tuple[bool, ...], present: tuple[bool, ...]) -> Launch:
    """The launch of backward: twice as many warps, because a thread also holds sums."""
    constants = {"DGAMMA": needs[1], "DBETA": needs[2], "TK": columns, "STAGES": stages}
    return norm_gradient_kernel.bind(constants, 2 * warps)
