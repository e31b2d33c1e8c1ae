"""What a cast makes on its way: activations and their gradients, which a kernel of its own makes too, and norms.

`activated` and `slope` take fp32 values of a narrower dtype and round to it wherever eager torch would, with its
arithmetic. GELU alone is faster than torch's and not its bits: its exponential is the hardware's, good to about 2^-21,
so a result next to a tie may round to the other neighbour; far below 0, where both cancel in 1 + tanh, digits differ.
The kernel that makes a norm alone (`kernels/norms.py`) has the same arithmetic, `affine`, and so the same bits.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from duotone.kernels.launch import Launch, kernel

GELU, RELU, SRELU, SILU = (tl.constexpr(i) for i in range(4))
ACTIVATIONS = {"gelu": GELU.value, "relu": RELU.value, "srelu": SRELU.value, "silu": SILU.value}

NOTHING, VALUE, GATED, SLOPE, GATED_SLOPE, NORMED = (tl.constexpr(i) for i in range(6))
"""What is made of the inputs: x as it is; f(x); f(a) b of x = [a, b]; the gradients of the two; the norm of x."""

BETA, KAPPA = tl.constexpr(0.7978845608028654), tl.constexpr(0.044715)


@triton.jit
def rounded(value, DTYPE: tl.constexpr):
    return value.to(DTYPE).to(tl.float32)


@triton.jit
def gelu_tanh(x):
    """The hyperbolic tangent inside of GELU."""
    return 2.0 / (1.0 + tl.exp(-2.0 * BETA * (x + KAPPA * (x * x * x)))) - 1.0


@triton.jit
def activated(x, ACT: tl.constexpr, DTYPE: tl.constexpr):
    """f(x)."""
    if ACT == GELU:
        made = 0.5 * x * (1.0 + gelu_tanh(x))
    elif ACT == SILU:
        made = tl.div_rn(x, 1.0 + libdevice.exp(-x))
    else:
        made = tl.where(x <= 0.0, 0.0, x)
        if ACT == SRELU:
            made = made * made
    return rounded(made, DTYPE)


@triton.jit
def slope(dy, x, ACT: tl.constexpr, DTYPE: tl.constexpr):
    """dy f'(x)."""
    if ACT == GELU:
        tanh = gelu_tanh(x)
        inner = BETA * (1.0 + 3.0 * KAPPA * x * x)
        made = dy * (0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * inner)
    elif ACT == SILU:
        gate = tl.div_rn(x * 0.0 + 1.0, 1.0 + libdevice.exp(-x))
        made = dy * gate * (1.0 + x * (1.0 - gate))
    else:
        if ACT == SRELU:
            dy = rounded(dy * rounded(2.0 * tl.where(x <= 0.0, 0.0, x), DTYPE), DTYPE)
        made = tl.where(x <= 0.0, 0.0, dy)
    return rounded(made, DTYPE)


@triton.jit
def affine(centred, rstd, gamma, beta):
    """centred rstd gamma + beta, without what is None. The last two steps round once, in whatever kernel this is."""
    made = centred * rstd
    if beta is not None:
        made = tl.fma(made, gamma, beta)
    elif gamma is not None:
        made = made * gamma
    return made


@triton.jit
def wide(x, at, inside):
    """fp32 values, 0 where not `inside`; None without x."""
    if x is None:
        value = None
    elif inside is None:
        value = tl.load(x + at).to(tl.float32)
    else:
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def normed(x, norm, row, m, k, M, K, inside, DTYPE: tl.constexpr):
    """Elements of the norm of x; `norm` holds mean and rstd (M,), gamma and beta (K,), None where there is none."""
    mean, rstd, gamma, beta = norm
    rows, cols = None, None
    if inside is not None:
        rows, cols = row + m < M, k < K
    value = wide(x + row * K, m * K + k, inside)
    if mean is not None:
        value = value - wide(mean + row, m, rows)
    made = affine(value, wide(rstd + row, m, rows), wide(gamma, k, cols), wide(beta, k, cols))
    if inside is not None:
        made = tl.where(inside, made, 0.0)
    return rounded(made, DTYPE)


@triton.jit
def produced(x, z, norm, row, m, k, first, M, K, inside, WHAT: tl.constexpr, ACT: tl.constexpr):
    """Elements (row + m, k) of the matrix (M, K) that is made of x, and for gradients of dy = x and the input z.

    `first` says whether they lie in the first half of a gated gradient. `row` is 64-bit: a tile may start beyond 2^31
    elements, and offsets inside of it stay below. `norm` is that of `normed`.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    if WHAT == NOTHING:
        made = wide(x + row * K, m * K + k, inside)
    elif WHAT == VALUE:
        made = activated(wide(x + row * K, m * K + k, inside), ACT, DTYPE)
    elif WHAT == GATED:
        a = wide(x + row * 2 * K, m * 2 * K + k, inside)
        b = wide(x + row * 2 * K + K, m * 2 * K + k, inside)
        made = rounded(activated(a, ACT, DTYPE) * b, DTYPE)
    elif WHAT == SLOPE:
        made = slope(wide(x + row * K, m * K + k, inside), wide(z + row * K, m * K + k, inside), ACT, DTYPE)
    elif WHAT == NORMED:
        made = normed(x, norm, row, m, k, M, K, inside, DTYPE)
    else:
        F = K // 2
        half = k if first else k - F
        dy, a = wide(x + row * F, m * F + half, inside), wide(z + row * K, m * K + half, inside)
        if first:
            made = slope(rounded(dy * wide(z + row * K + F, m * K + half, inside), DTYPE), a, ACT, DTYPE)
        else:
            made = rounded(dy * activated(a, ACT, DTYPE), DTYPE)
    return made


@kernel
def produce_kernel(x, z, out, M, K, WHAT: tl.constexpr, ACT: tl.constexpr, TM: tl.constexpr, TK: tl.constexpr):
    """The matrix (M, K) itself."""
    across = tl.cdiv(K, TK)
    pm, pk = tl.program_id(0) // across, tl.program_id(0) % across
    row = (pm * TM).to(tl.int64)
    m, k = tl.arange(0, TM)[:, None], (pk * TK + tl.arange(0, TK))[None, :]
    inside = (pm * TM + m < M) & (k < K)
    value = produced(x, z, None, row, m, k, pk * TK < K // 2, M, K, inside, WHAT, ACT)
    tl.store(out + row * K + (m * K + k), value.to(out.dtype.element_ty), mask=inside)


class Produced(NamedTuple):
    """A matrix (M, K) that is not there yet: `what` of the activation `act` over x, and z; or the norm of x.

    For a norm, `act` says which of mean, gamma and beta there are.
    """

    what: int
    act: int
    x: Tensor
    z: Tensor | None
    shape: tuple[int, int]
    norm: Any = None
    """`kernels.norms.Norm`."""

    @property
    def saved(self) -> tuple[Tensor, ...]:
        """What backward needs besides the inputs: there once the matrix is made, or encoded on the way."""
        return () if self.norm is None else self.norm.saved

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What kernels read: x, z, and mean, rstd, gamma and beta of a norm that is measured."""
        of = self.norm
        return (self.x, self.z, *(NO_NORM if of is None else (of.mean, of.rstd, of.gamma, of.beta)))


NO_NORM = (None, None, None, None)

TILE = (4, 1024, 4)
"""Rows, columns and warps. Columns of a gated gradient's halves are a multiple, see `fits`."""


def value(act: str, x: Tensor, gated: bool) -> Produced:
    """f(x), or f(a) b, of contiguous (M, K) or (M, 2K)."""
    m, k = x.shape
    return Produced((GATED if gated else VALUE).value, ACTIVATIONS[act], x, None, (m, k // 2 if gated else k))


def gradient(act: str, dy: Tensor, x: Tensor, gated: bool) -> Produced:
    """The gradient of x under dy; both contiguous."""
    what = (GATED_SLOPE if gated else SLOPE).value
    return Produced(what, ACTIVATIONS[act], dy, x, (x.shape[0], x.shape[1]))


def normalised(norm: Any) -> Produced:
    """The norm."""
    return Produced(NORMED.value, norm.variant, norm.x, None, norm.x.shape, norm)


def fits(made: Produced, columns: int) -> bool:
    """Whether no tile of that many columns lies in both halves."""
    return made.what != GATED_SLOPE.value or not made.shape[1] // 2 % columns


def produce(made: Produced) -> Tensor:
    """The matrix, in the dtype of x."""
    if made.norm is not None:
        return made.norm.make()
    m, k = made.shape
    columns = TILE[1] if fits(made, TILE[1]) else next(n for n in (256, 64, 16, 4, 2, 1) if fits(made, n))
    out = torch.empty((m, k), dtype=made.x.dtype, device=made.x.device)
    launch = _launch(made.what, made.act, columns)
    launch(-(-m // TILE[0]) * -(-k // columns), (made.x, made.z, out), (m, k))
    return out


@functools.cache
def _launch(what: int, act: int, columns: int) -> Launch:
    constants: dict[str, Any] = {"WHAT": what, "ACT": act, "TM": TILE[0], "TK": columns}
    return produce_kernel.bind(constants, TILE[2] if columns >= 256 else 1)
