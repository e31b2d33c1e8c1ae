"""What a cast kernel computes itself: norms, activations and their gradients. A second kernel computes only these.

`activated` and `slope` take fp32 values of a narrower dtype and round to it wherever eager torch would, with its
arithmetic. Only GELU does not have torch's bits, because it is faster. It takes the hardware's exponential, which is
good to about 2^-21, so a result next to a tie may round to the other neighbour. Far below 0, where torch cancels in
1 + tanh, digits differ.
The kernel that computes a norm alone (`kernels/norms.py`) has the same arithmetic, `affine`, and so the same bits.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from duotone.kernels.amax import record
from duotone.kernels.launch import Constants, Launch, kernel
from duotone.kernels.norms import Norm
from duotone.kernels.values import affine, wide

GELU, RELU, SRELU, SILU = (tl.constexpr(i) for i in range(4))
ACTIVATIONS = {"gelu": GELU.value, "relu": RELU.value, "srelu": SRELU.value, "silu": SILU.value}

NOTHING, VALUE, GATED, SLOPE, GATED_SLOPE, NORMED = (tl.constexpr(i) for i in range(6))
"""What is computed from the inputs: x itself; f(x); f(a) b of x = [a, b]; the gradients of these two; the norm of x."""

BETA, KAPPA = tl.constexpr(0.7978845608028654), tl.constexpr(0.044715)
EXPONENT = tl.constexpr(-2 * BETA.value * 1.4426950408889634)
"""-2 BETA log2 e."""

LARGEST, SCALE = tl.constexpr(3.4028234663852886e38), tl.constexpr(2.0**-32)


ROUND_TWO = tl.constexpr("""{
    .reg .b32 two;
    cvt.rn.bf16x2.f32 two, $3, $2;
    shl.b32 $0, two, 16;
    and.b32 $1, two, 0xffff0000;
}""")


@triton.jit
def rounded(value, DTYPE: tl.constexpr):
    """fp32 -> DTYPE -> fp32. Two at a time to bf16: the conversion of one has a quarter of the rate."""
    if DTYPE == tl.bfloat16:
        result = tl.inline_asm_elementwise(ROUND_TWO, "=r,=r,r,r", [value], tl.float32, True, 2)
    else:
        result = value.to(DTYPE).to(tl.float32)
    return result


@triton.jit
def near_exp2(x):
    """2^x to 2^-22, 0 where that is subnormal."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def near_reciprocal(x):
    """1 / x to an ulp, 0 where that is subnormal. Triton's division takes eight instructions more."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def gelu_sigmoid(x):
    """GELU's factor (1 + tanh u) / 2 = 1 / (1 + exp(-2 u)) of u = BETA (x + KAPPA x^3)."""
    return near_reciprocal(1.0 + near_exp2(x * tl.fma(x * x, EXPONENT * KAPPA, EXPONENT)))


@triton.jit
def sigmoid_and_silu(x, DTYPE: tl.constexpr):
    """1 / d and x / d of d = 1 + exp(-x).

    Narrow inputs avoid the branches of a division, which keep instructions from overlapping. They take one of Newton's
    steps for the reciprocal and one for the quotient (Markstein). They divide by d / 2^32, so that no reciprocal is
    subnormal. Both are rounded to nearest, except next to x = 0, where one is off by an ulp. This changes no value and
    no gradient of normal size: all of those inputs were checked.
    """
    d = 1.0 + libdevice.exp(-x)
    if DTYPE == tl.float32:
        sigmoid, silu = tl.div_rn(x * 0.0 + 1.0, d), tl.div_rn(x, d)
    else:
        divisor = tl.minimum(d, LARGEST) * SCALE
        near = near_reciprocal(divisor)
        inverse = tl.fma(near, tl.fma(-divisor, near, 1.0), near)
        inverse = tl.where(d <= LARGEST, inverse, 0.0)
        sigmoid, near = inverse * SCALE, x * inverse
        silu = tl.fma(tl.fma(divisor, near, -x), inverse * -1.0, near) * SCALE  # with these signs -0 stays -0
        silu = tl.where(tl.abs(x) < 1e9, silu, x * sigmoid)  # beyond, d is 1 or infinite
    return sigmoid, silu


@triton.jit
def activated(x, ACT: tl.constexpr, DTYPE: tl.constexpr):
    """f(x)."""
    if ACT == GELU:
        result = x * gelu_sigmoid(x)
    elif ACT == SILU:
        _, result = sigmoid_and_silu(x, DTYPE)
    else:
        result = tl.where(x <= 0.0, 0.0, x)
        if ACT == SRELU:
            result = result * result
    return rounded(result, DTYPE)


@triton.jit
def slope(dy, x, ACT: tl.constexpr, DTYPE: tl.constexpr):
    """dy f'(x)."""
    if ACT == GELU:
        part = gelu_sigmoid(x)
        inner = x * tl.fma(tl.minimum(x * x, 1e6), 6.0 * BETA * KAPPA, 2.0 * BETA)  # finite where torch's is
        result = dy * tl.fma(inner, tl.fma(-part, part, part), part)
    elif ACT == SILU:
        gate, _ = sigmoid_and_silu(x, DTYPE)
        result = dy * gate * (1.0 + x * (1.0 - gate))
    else:
        if ACT == SRELU:
            dy = rounded(dy * rounded(2.0 * tl.where(x <= 0.0, 0.0, x), DTYPE), DTYPE)
        result = tl.where(x <= 0.0, 0.0, dy)
    return rounded(result, DTYPE)


@triton.jit
def normed(x, norm, row, m, k, M, K, inside, DTYPE: tl.constexpr):
    """Elements of the norm of x; `norm` holds mean and rstd (M,), gamma and beta (K,), or None."""
    mean, rstd, gamma, beta = norm
    rows, cols = None, None
    if inside is not None:
        rows, cols = row + m < M, k < K
    value = wide(x + row * K, m * K + k, inside)
    if mean is not None:
        value = value - wide(mean + row, m, rows)
    result = affine(value, wide(rstd + row, m, rows), wide(gamma, k, cols), wide(beta, k, cols))
    if inside is not None:
        result = tl.where(inside, result, 0.0)
    return rounded(result, DTYPE)


@triton.jit
def produced(x, z, norm, row, m, k, M, K, inside, WHAT: tl.constexpr, ACT: tl.constexpr):
    """Elements (row + m, k) of the matrix (M, K) that follows from x; of a gradient, from dy = x and the input z.

    `row` is 64-bit: a tile may start beyond 2^31 elements, and offsets inside of it stay below. `norm` is that of
    `normed`.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    if WHAT == NOTHING:
        result = wide(x + row * K, m * K + k, inside)
    elif WHAT == VALUE:
        result = activated(wide(x + row * K, m * K + k, inside), ACT, DTYPE)
    elif WHAT == GATED:
        a = wide(x + row * 2 * K, m * 2 * K + k, inside)
        b = wide(x + row * 2 * K + K, m * 2 * K + k, inside)
        result = rounded(activated(a, ACT, DTYPE) * b, DTYPE)
    elif WHAT == SLOPE:
        result = slope(wide(x + row * K, m * K + k, inside), wide(z + row * K, m * K + k, inside), ACT, DTYPE)
    else:
        result = normed(x, norm, row, m, k, M, K, inside, DTYPE)
    return result


@triton.jit
def gated_slopes(x, z, row, m, k, F, inside, ACT: tl.constexpr):
    """Elements (row + m, k) and (row + m, F + k) of the gradient (M, 2F) of z = [a, b] under dy = x (M, F)."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    dy, at = wide(x + row * F, m * F + k, inside), m * 2 * F + k
    a, b = wide(z + row * 2 * F, at, inside), wide(z + row * 2 * F + F, at, inside)
    return slope(rounded(dy * b, DTYPE), a, ACT, DTYPE), rounded(dy * activated(a, ACT, DTYPE), DTYPE)


@functools.partial(kernel, any_alignment=("live",))
def produce_kernel(
    x, z, out, live, M, K,
    WHAT: tl.constexpr, ACT: tl.constexpr, RECORD: tl.constexpr, TM: tl.constexpr, TK: tl.constexpr,
):  # fmt: skip
    """The matrix (M, K) itself and, where RECORD, its amax; of gated gradients a tile in each half."""
    WIDTH = K // 2 if WHAT == GATED_SLOPE else K
    across = tl.cdiv(WIDTH, TK)
    pm, pk = tl.program_id(0) // across, tl.program_id(0) % across
    row = (pm * TM).to(tl.int64)
    m, k = tl.arange(0, TM)[:, None], (pk * TK + tl.arange(0, TK))[None, :]
    inside, to = (pm * TM + m < M) & (k < WIDTH), out + row * K + (m * K + k)
    if WHAT == GATED_SLOPE:
        value, second = gated_slopes(x, z, row, m, k, WIDTH, inside, ACT)
        tl.store(to + WIDTH, second.to(out.dtype.element_ty), mask=inside)
        largest = tl.maximum(tl.abs(value), tl.abs(second))
    else:
        value = produced(x, z, None, row, m, k, M, K, inside, WHAT, ACT)
        largest = tl.abs(value)
    tl.store(to, value.to(out.dtype.element_ty), mask=inside)
    if RECORD:
        record(live, largest)


class FusedProducer(NamedTuple):
    """A matrix (M, K) that is not computed yet: `what` of the activation `act` over x and z, or the norm of x.

    For a norm, `act` says which of mean, gamma and beta exist.
    """

    what: int
    act: int
    x: Tensor
    z: Tensor | None
    shape: tuple[int, int]
    norm: Norm | None = None

    @property
    def saved(self) -> tuple[Tensor, ...]:
        """What backward needs besides the inputs. It exists once the matrix was computed or encoded."""
        return () if self.norm is None else self.norm.saved

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What kernels read: x, z, and mean, rstd, gamma and beta of a norm that is measured."""
        of = self.norm
        return (self.x, self.z, *(NO_NORM if of is None else (of.mean, of.rstd, of.gamma, of.beta)))


NO_NORM = (None, None, None, None)

TILE = (2, 1024, 4)
"""Rows, columns and warps."""


def value(act: str, x: Tensor, gated: bool) -> FusedProducer:
    """f(x), or f(a) b, of contiguous (M, K) or (M, 2K)."""
    m, k = x.shape
    return FusedProducer((GATED if gated else VALUE).value, ACTIVATIONS[act], x, None, (m, k // 2 if gated else k))


def gradient(act: str, dy: Tensor, x: Tensor, gated: bool) -> FusedProducer:
    """The gradient of x under dy; both contiguous."""
    what = (GATED_SLOPE if gated else SLOPE).value
    return FusedProducer(what, ACTIVATIONS[act], dy, x, (x.shape[0], x.shape[1]))


def normalised(norm: Norm) -> FusedProducer:
    """The norm."""
    return FusedProducer(NORMED.value, norm.variant, norm.x, None, norm.x.shape, norm)


def materialize(producer: FusedProducer, live: Tensor | None = None) -> Tensor:
    """The matrix, in the dtype of x. `live`, the bits of an fp32 amax as int32 (1,), is enlarged; a norm's is not."""
    if producer.norm is not None:
        return producer.norm.make()
    m, k = producer.shape
    out = torch.empty((m, k), dtype=producer.x.dtype, device=producer.x.device)
    wide = k // 2 if producer.what == GATED_SLOPE.value else k
    launch = _launch(producer.what, producer.act, live is not None)
    launch(-(-m // TILE[0]) * -(-wide // TILE[1]), (producer.x, producer.z, out, live), (m, k))
    return out


@functools.cache
def _launch(what: int, act: int, record: bool) -> Launch:
    constants: Constants = {"WHAT": what, "ACT": act, "RECORD": record, "TM": TILE[0], "TK": TILE[1]}
    return produce_kernel.bind(constants, TILE[2])
