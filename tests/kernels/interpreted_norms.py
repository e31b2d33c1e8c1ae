"""Checks: the kernels of norms against float64, alone and on the way of a cast."""

import itertools

import torch
import triton
import triton.language as tl
from interpreting import Check, bits
from torch import Tensor

from duotone import formats
from duotone.dispatch.casts import _spec
from duotone.kernels import activations, norms
from duotone.kernels.cast import Cast
from duotone.kernels.norms import Norm, backward

EPS = 1e-5
SHAPES = [(1, 1), (19, 72), (17, 1000), (3, 4112)]
CASTS = ["fp8_e4m3_delayed", "fp8_e4m3_tensor", "fp8_e4m3_row", "fp8_e4m3_1x128", "fp8_e4m3_128x128", "mxfp8_e4m3"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SIDES = [(True, True), (True, False), (False, True)]
Parameters = tuple[Tensor | None, Tensor | None]


def parameters(k: int, dtype: torch.dtype) -> list[tuple[bool, Parameters]]:
    """Whether the mean is subtracted, gamma and beta: a LayerNorm, one without parameters, an RMSNorm."""
    gamma, beta = (1 + torch.randn(k) / 4).to(dtype), torch.randn(k).to(dtype)
    return [(True, (gamma, beta)), (True, (gamma, None)), (True, (None, None)), (False, (gamma, None))]


def exact(x: Tensor, gamma: Tensor | None, beta: Tensor | None, centred: bool) -> list[Tensor]:
    """y, mean and rstd in float64."""
    mean = x.mean(-1, keepdim=True) if centred else torch.zeros(1)
    value = x - mean
    rstd = (value.square().mean(-1, keepdim=True) + EPS).rsqrt()
    y = value * rstd * (1 if gamma is None else gamma) + (0 if beta is None else beta)
    return [y, mean, rstd] if centred else [y, rstd]


def close(result: Tensor, want: Tensor, step: float) -> bool:
    """Within a rounding of the dtype and 64 of fp32 of the largest magnitude of a row."""
    bound = (step + 64 * torch.finfo(torch.float32).eps) * (1 + want.abs().amax(-1, keepdim=True))
    return bool(((result.double() - want).abs() <= bound).all())


def gradients(dy: Tensor, x: Tensor, norm: Norm, step: float, where: str) -> Check:
    """All of them, and for one shape each choice."""
    leaves = [t.double().requires_grad_() for t in (x, norm.gamma, norm.beta) if t is not None]
    y, *_ = exact(leaves[0], *([*leaves[1:], None, None][:2]), norm.centred)
    want = torch.autograd.grad(y, leaves, dy.double())
    for needs in itertools.product((True, False), repeat=3) if len(x) == 33 else [(True, True, True)]:
        required = needs[0], needs[1] and norm.gamma is not None, needs[2] and norm.beta is not None
        result = backward(dy, x, norm.gamma, norm.mean, norm.rstd, required)
        yield f"{where} gradients {needs}", [one is not None for one in result] == list(required)
        for i, one in enumerate(result):
            if one is not None:
                yield f"{where} gradient {i} {needs}", one.dtype is x.dtype and close(one, want[i], 2 * step)


def alone() -> Check:
    for shape, dtype in [*itertools.product(SHAPES, DTYPES[:1]), *itertools.product(SHAPES[1:2], DTYPES[1:])]:
        x, dy = (torch.randn(shape) * 3 + 1).to(dtype), torch.randn(shape).to(dtype)
        for i, (centred, affine) in enumerate(parameters(shape[1], dtype)):
            where, step = f"{shape} {dtype} {i}", torch.finfo(dtype).eps
            norm, other = (Norm(x, *affine, EPS, centred, shape[:1]) for _ in range(2))
            y = norm.make()
            want = exact(x.double(), *(None if p is None else p.double() for p in affine), centred)
            for name, result, right in zip(("y", "mean", "rstd"), (y, *norm.saved), want, strict=False):
                yield (
                    f"{where} {name}",
                    result.shape == right.shape and close(result, right, step if name == "y" else 0.0),
                )
            amax = other.measure_amax()
            yield f"{where} amax", torch.equal(amax, y.float().abs().max().reshape(1))
            yield f"{where} measured", all(torch.equal(a, b) for a, b in zip(norm.saved, other.saved, strict=True))
            yield from gradients(dy, x, norm, step, where)


def awkward_rows(k: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(70, k)
    x[2], x[3, 5], x[4, 7], x[5, 0] = 0.0, float("nan"), float("inf"), -float("inf")
    x[6] *= 1e4
    return x.to(dtype)


def on_the_way() -> Check:
    """Every format with each choice of parameters; shapes, planes and dtypes take turns."""
    turns = zip(itertools.cycle(SIDES), itertools.cycle(DTYPES[:2] + DTYPES), strict=False)
    for name, i in itertools.product(CASTS, range(4)):
        (sides, dtype), (rows, k) = next(turns), [(64, 128), (70, 144)][i % 2]
        fmt, x, (centred, affine) = formats.get(name), awkward_rows(k, dtype)[:rows], parameters(k, dtype)[i]
        row, col = (_spec(fmt, dtype) if used else None for used in sides)
        cast = Cast(row, col, all(sides) and fmt.is_derivable)
        scale, norm, other = torch.full((1,), 17.5), *(Norm(x, *affine, EPS, centred, (rows,)) for _ in range(2))
        lives = [torch.zeros(1, dtype=torch.int32) if fmt.is_delayed else None for _ in range(2)]
        after = cast(norm.make(), (scale, scale), lives[0])
        result = activations.normalised(other)
        between = cast.produced(result, (scale, scale), lives[1])
        where = f"{name} {dtype} {rows} {i} {sides}"
        yield f"{where} amax", lives[0] is lives[1] is None or torch.equal(lives[0], lives[1])
        yield (
            f"{where} saved",
            all(torch.equal(bits(a), bits(b)) for a, b in zip(norm.saved, result.saved, strict=True)),
        )
        for a, b in zip(after, between, strict=True):
            yield where, a is b is None or all(torch.equal(bits(a[part]), bits(b[part])) for part in a)


@triton.jit
def rounded(value, DTYPE: tl.constexpr):
    """In place of the inline assembly of `activations.rounded`, which the interpreter has not."""
    return value.to(DTYPE).to(tl.float32)


REPLACED = [
    (activations, "rounded", rounded),
    (norms, "SUMS", 8192),  # so that a program walks over rows
]


def checks(everything: bool) -> Check:
    yield from alone()
    yield from on_the_way()
