"""Activations: the bits of torch's eager operations and autograd, float64's values, errors."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from duotone import UserError, ops
from duotone.dispatch.activations import ACTIVATIONS
from duotone.modules.activation import ActivationOp

UNARY = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}
GATE_OF = {"glu": "sigmoid", "geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}


def clamped(x: Tensor, limit: float = 7.0, alpha: float = 1.702) -> Tensor:
    """The gradient passes at the limits themselves, as through the clamp of torch 2.13. A NaN has none."""
    a, b = x.chunk(2, -1)
    a = a.where(a <= limit, a.detach().clamp(max=limit))
    b = b.where(b.abs() <= limit, b.detach().clamp(-limit, limit))
    return a * torch.sigmoid(alpha * a) * (b + 1)


def situ(x: Tensor, beta1: float = 4.0, beta2: float = 25.0) -> Tensor:
    a, b = (x if x.dtype == torch.float64 else x.float()).chunk(2, -1)
    y = beta1 * torch.tanh(a / beta1) * torch.sigmoid(a) * (beta2 * torch.tanh(b / beta2))
    return y.to(x.dtype)


def gated(name: str):
    def value(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return UNARY[name](a) * b

    return value


REFERENCE = {
    **{name: UNARY[name] for name in ("gelu", "qgelu", "relu", "srelu", "silu")},
    **{name: gated(unary) for name, unary in GATE_OF.items()},
    "clamped_swiglu": clamped,
    "situglu": situ,
}
ORDINARY = (ops.GELU, ops.GEGLU, ops.GLU, ops.QGELU, ops.QGEGLU, ops.ReLU, ops.ReGLU, ops.SReLU, ops.SReGLU, ops.SiLU)
CLASSES = {cls().kind: cls for cls in (*ORDINARY, ops.SwiGLU, ops.ClampedSwiGLU, ops.SiTUGLU)}
SHAPES = [(33, 96), (2, 3, 34), (1, 2), (0, 8), (2, 0, 6), (10,)]


def outcome(function, x: Tensor, dy: Tensor | None) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    y = function(leaf)
    y.backward(torch.ones_like(y) if dy is None else dy)
    assert leaf.grad is not None
    gradient, leaf.grad = leaf.grad, None
    return [y.detach(), gradient]


def same(result: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(result, want, strict=True):
        assert a.dtype == b.dtype
        assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_every_activation_has_a_reference_and_a_class() -> None:
    assert set(ACTIVATIONS) == set(REFERENCE) == set(CLASSES)
    assert {name for name, result in ACTIVATIONS.items() if result.gated} == {*GATE_OF, "clamped_swiglu", "situglu"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", REFERENCE)
def test_values_and_gradients_have_the_bits_of_eager_autograd(name, dtype) -> None:
    """All shapes, and a gradient that is not contiguous."""
    op = CLASSES[name]()
    for shape in SHAPES:
        x = (3 * torch.randn(shape)).to(dtype)
        out = REFERENCE[name](x).shape
        wide = torch.randn(*out[:-1], 2 * out[-1]).to(dtype)
        for dy in (wide[..., : out[-1]].contiguous(), wide[..., ::2]):
            same(outcome(op, x, dy), outcome(REFERENCE[name], x, dy))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", REFERENCE)
def test_nan_infinity_and_denormals_have_the_bits_of_eager_autograd(awkward, name, dtype) -> None:
    x = awkward.to(dtype)
    dy = torch.randn(REFERENCE[name](x).shape).to(dtype)
    same(outcome(CLASSES[name](), x, dy), outcome(REFERENCE[name], x, dy))


@pytest.mark.parametrize("name", REFERENCE)
def test_values_and_gradients_are_float64_within_a_few_roundings(name) -> None:
    """Bound: 8 roundings of the dtype, of the largest magnitude in the result."""
    for dtype in (torch.float32, torch.bfloat16):
        x = (3 * torch.randn(40, 34)).to(dtype)
        dy = torch.randn(REFERENCE[name](x).shape).to(dtype)
        exact = outcome(REFERENCE[name], x.double(), dy.double())
        for result, want in zip(outcome(CLASSES[name](), x, dy), exact, strict=True):
            assert (result.double() - want).abs().max() <= 8 * torch.finfo(dtype).eps * want.abs().max()


@pytest.mark.parametrize("name", REFERENCE)
def test_strided_input_has_the_bits_of_eager_autograd_and_is_not_written(name) -> None:
    base = torch.randn(32, 24)
    for x in (base.t(), base[:, ::2], base[3:, 1:23]):
        before = x.clone()
        same(outcome(CLASSES[name](), x, None), outcome(REFERENCE[name], x, None))
        assert torch.equal(x, before)


@pytest.mark.parametrize(("limit", "alpha"), [(7.0, 1.702), (1.0, 1.0), (0.5, 3.0)])
def test_clamped_swiglu_takes_its_limit_and_slope(limit, alpha) -> None:
    """At the limits themselves, too, and whatever computes the gradient."""
    x, dy = torch.randn(20, 32), torch.randn(20, 16)
    x[:, ::5], x[:, 1::7] = limit, -limit
    want = outcome(lambda t: clamped(t, limit, alpha), x, dy)
    op = ops.ClampedSwiGLU(limit=limit, alpha=alpha)
    same(outcome(op, x, dy), want)
    leaf = x.clone().requires_grad_()
    same([*torch.autograd.grad(op(leaf), leaf, dy, create_graph=True), torch.func.vjp(op, x)[1](dy)[0]], [want[1]] * 2)
    same(outcome(ActivationOp("clamped_swiglu", {"limit": limit, "alpha": alpha}), x, dy), want)


def test_nothing_is_kept_without_a_gradient_and_only_the_input_with_one() -> None:
    saved: list[Tensor] = []
    x = torch.randn(4, 8)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        for cls in CLASSES.values():
            cls()(x)
            with torch.no_grad():
                cls()(x.clone().requires_grad_())
        assert not saved
        leaf = x.clone().requires_grad_()
        for cls in CLASSES.values():
            cls()(leaf)
    assert len(saved) == 2 * len(CLASSES)  # for the backward, and for graphs of it
    assert all(t.data_ptr() == leaf.data_ptr() and t.shape == leaf.shape for t in saved)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_keep_the_parameters(copier) -> None:
    op, x = ops.ClampedSwiGLU(limit=0.5, alpha=2.0), torch.randn(4, 8)
    assert torch.equal(copier(op)(x), op(x)) and not torch.equal(op(x), ops.ClampedSwiGLU()(x))


def test_errors_are_one_line() -> None:
    with pytest.raises(UserError, match=r"activation 'tanh' is unknown; allowed are gelu, "):
        ActivationOp("tanh")
    with pytest.raises(UserError, match=r"activation_params has 'limit'; gelu takes nothing"):
        ActivationOp("gelu", {"limit": 1.0})
    with pytest.raises(UserError, match=r"activation_params has 'beta'; clamped_swiglu takes limit and alpha"):
        ActivationOp("clamped_swiglu", {"beta": 1.0})
    with pytest.raises(UserError, match="swiglu takes an even last dimension, two halves; got 9"):
        ops.SwiGLU()(torch.zeros(2, 9))
    with pytest.raises(UserError, match="takes a tensor"):
        ops.GELU()(None)


def test_situglu_takes_its_caps() -> None:
    x, dy = 9 * torch.randn(20, 32), torch.randn(20, 16)
    same(outcome(ops.SiTUGLU(beta1=2.0, beta2=3.0), x, dy), outcome(lambda t: situ(t, 2.0, 3.0), x, dy))
    assert ops.SiTUGLU(beta1=2.0, beta2=3.0)(1000 * x.abs()).abs().max() <= 6.0


SCALED = {
    "srelu": ops.ScaledSReLU,
    "swiglu": ops.ScaledSwiGLU,
    "clamped_swiglu": ops.ScaledClampedQGeGLU,
    "situglu": ops.ScaledSiTUGLU,
}


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SCALED)
def test_scaled_activations_are_the_activation_times_a_scale_of_each_row(name, dtype, scale_dtype) -> None:
    """Values and both gradients against float64, within 8 roundings of the largest magnitude; the tangent of a second
    derivative against autograd's own."""
    x, scales = (3 * torch.randn(4, 5, 34)).to(dtype), torch.rand(4, 5).to(scale_dtype)
    scales[0, 0] = 0.0
    dy = torch.randn(REFERENCE[name](x).shape).to(dtype)
    leaves = [x.clone().requires_grad_(), scales.clone().requires_grad_()]
    y = SCALED[name]()(leaves[0], leaves[1])
    y.backward(dy)
    assert y.dtype == dtype and leaves[1].grad.shape == scales.shape and leaves[1].grad.dtype == scale_dtype
    exact = [x.double().requires_grad_(), scales.double().requires_grad_()]
    expected = REFERENCE[name](exact[0]) * exact[1].unsqueeze(-1)
    expected.backward(dy.double())
    eps = max(torch.finfo(dtype).eps, torch.finfo(scale_dtype).eps)
    pairs = [(y, expected), (leaves[0].grad, exact[0].grad), (leaves[1].grad, exact[1].grad)]
    for result, want in pairs:
        assert (result.double() - want).abs().max() <= 8 * eps * want.abs().max()
    op = SCALED[name]()
    twice = [x.double().requires_grad_(), scales.double().requires_grad_()]
    penalty = torch.autograd.grad(op(*twice).square().sum(), twice, create_graph=True)
    other = torch.autograd.grad(
        (REFERENCE[name](exact[0]) * exact[1].unsqueeze(-1)).square().sum(), exact, create_graph=True
    )
    for result, want in zip(
        torch.autograd.grad(sum(p.square().sum() for p in penalty), twice),
        torch.autograd.grad(sum(p.square().sum() for p in other), exact),
        strict=True,
    ):
        assert_close(result, want)


def test_scaled_activations_stand_between_experts() -> None:
    """The weights of a router between two grouped linears, as a further input of a Sequential."""
    fc1, fc2 = ops.GroupedLinear(2, 16, 32, name="a"), ops.GroupedLinear(2, 16, 16, name="b")
    x, scales = torch.randn(6, 16), torch.rand(6)
    y = ops.Sequential(fc1, ops.ScaledSwiGLU(), fc2)(x, [2, 4], scales, [2, 4])
    assert torch.equal(y, fc2(ops.SwiGLU()(fc1(x, [2, 4])) * scales.unsqueeze(-1), [2, 4]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ops.ScaledSwiGLU(glu_interleave_size=32),
            "glu_interleave_size is 32; swiglu takes its halves",
        ),
        (lambda: ops.ScaledSReLU(limit=1.0), "activation_params has 'limit'; srelu takes nothing"),
        (lambda: ops.ScaledSReLU()(torch.randn(4, 8), torch.rand(5)), "a scale for each of 4 rows; got \\(5,\\)"),
        (lambda: ops.ScaledSReLU()(torch.randn(4, 8), [1.0] * 4), "takes a floating tensor of scales on cpu; got list"),
        (lambda: ops.ScaledSReLU()(torch.randn(4, 8)), "0 further inputs were given to ops that take 1"),
    ],
)
def test_scales_that_do_not_fit_are_refused(call, message) -> None:
    with pytest.raises(UserError, match=message):
        call()
