"""GroupedLinear writes to buffers of its caller: `out` and `dgrad_out`, core 87."""

import re

import pytest
import torch
from torch import Tensor

from duotone import UserError, recipes
from duotone.modules import GroupedLinear, Linear

K, N, ROWS = 32, 48, 40
MX = recipes.load("mxfp8")
SPLITS = [9, 0, 30, 1]
TAIL = 7.0
"""What the rows beyond the sum of the splits hold before and after."""


def grouped(recipe, **options) -> GroupedLinear:
    return GroupedLinear(4, K, N, recipe=recipe, name="g", **options)


def separate(m: GroupedLinear) -> list[Linear]:
    """Linears of the same values."""
    results = []
    for i in range(4):
        one = Linear(K, N, recipe=m.recipe, name=f"g{i}", params_dtype=m.weight.dtype)
        with torch.no_grad():
            one.weight.copy_(getattr(m, f"weight{i}"))
            one.bias.copy_(getattr(m, f"bias{i}"))
        one.module_type = m.module_type
        results.append(one)
    return results


def buffers(m: GroupedLinear, lead: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    dtype = m.weight.dtype
    return torch.full((*lead, N), TAIL, dtype=dtype), torch.full((*lead, K), TAIL, dtype=dtype)


@pytest.mark.parametrize("tail", [0, 5])
@pytest.mark.parametrize("name", ["bf16", "mxfp8", "fp8-current", "nvfp4"])
def test_results_are_those_of_separate_linears_in_the_buffers_that_were_given(name, tail) -> None:
    """Bit for bit, for two calls that use the buffers again; rows beyond the last expert stay as they are."""
    m = grouped(recipes.load(name), params_dtype=torch.bfloat16)
    linears = separate(m)
    lead = (ROWS + tail,)
    out, dgrad_out = buffers(m, lead)
    for _ in range(2):
        x, dy = torch.randn(*lead, K).bfloat16(), torch.randn(*lead, N).bfloat16()
        x[0, :3] = torch.tensor([0.0, 1e-40, -0.0])
        leaf = x.clone().requires_grad_()
        m.zero_grad()
        for i, one in enumerate(linears):
            one.duotone_seed.copy_(m.duotone_seed + i)
        y = m(leaf, SPLITS, out=out, dgrad_out=dgrad_out)
        assert y.data_ptr() == out.data_ptr() and y.shape == out.shape and y.requires_grad
        assert not out.requires_grad and torch.equal(y, out)
        start, results = 0, []
        for one, rows in zip(linears, SPLITS, strict=True):
            segment = x[start : start + rows].clone().requires_grad_()
            one.zero_grad()
            part = one(segment)
            part.backward(dy[start : start + rows])
            results.append((part.detach(), segment.grad, one.weight.grad, one.bias.grad))
            start += rows
        y.backward(dy)
        assert leaf.grad.data_ptr() == dgrad_out.data_ptr()
        ys, dxs, dws, dbs = zip(*results, strict=True)
        assert torch.equal(out[:ROWS], torch.cat(ys)) and torch.equal(dgrad_out[:ROWS], torch.cat(dxs))
        assert bool((out[ROWS:] == TAIL).all()) and bool((dgrad_out[ROWS:] == TAIL).all())
        for i in range(4):
            assert torch.equal(getattr(m, f"weight{i}").grad, dws[i])
            assert torch.equal(getattr(m, f"bias{i}").grad, dbs[i])


def test_one_buffer_alone_and_leading_dimensions() -> None:
    m = grouped(recipes.load("mxfp8"))
    x, dy = torch.randn(5, 9, K), torch.randn(5, 9, N)
    out, dgrad_out = buffers(m, (5, 9))
    plain = x.clone().requires_grad_()
    expected = m(plain, [9, 0, 35, 1])
    expected.backward(dy)
    leaf = x.clone().requires_grad_()
    y = m(leaf, torch.tensor([9, 0, 35, 1]), dgrad_out=dgrad_out)
    y.backward(dy)
    assert torch.equal(y, expected) and torch.equal(dgrad_out, plain.grad) and torch.equal(leaf.grad, plain.grad)
    leaf = x.clone().requires_grad_()
    m(leaf, [9, 0, 30, 1], out=out).backward(dy)
    assert torch.equal(leaf.grad.view(-1, K)[40:], torch.zeros(5, K))
    with torch.no_grad():
        assert torch.equal(m(x, [9, 0, 35, 1], out=out), expected)


def test_splits_without_a_row_leave_everything() -> None:
    m = grouped(recipes.load("mxfp8"))
    out, dgrad_out = buffers(m, (6,))
    leaf = torch.randn(6, K, requires_grad=True)
    m(leaf, [0, 0, 0, 0], out=out, dgrad_out=dgrad_out).sum().backward()
    assert bool((out == TAIL).all()) and bool((dgrad_out == TAIL).all())
    assert not any(p.grad.any() for p in m.parameters())


def test_a_graph_of_gradients_gets_a_tensor_of_its_own() -> None:
    m = grouped(recipes.load("bf16"), bias=False)
    out, dgrad_out = buffers(m, (ROWS + 2,))
    x = torch.randn(ROWS + 2, K, requires_grad=True)
    y = m(x, SPLITS, out=out, dgrad_out=dgrad_out)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert dx.data_ptr() != dgrad_out.data_ptr()
    assert torch.equal(dx[:ROWS], dgrad_out[:ROWS]) and not dx[ROWS:].any() and bool((dgrad_out[ROWS:] == TAIL).all())


@pytest.mark.parametrize(("name", "width"), [("out", N), ("dgrad_out", K)])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x, n: [0.0], "{name} is a plain tensor ({rows}, {n}) to write to; got list"),
        (lambda x, n: torch.zeros(ROWS, n + 1), "{name} must be ({rows}, {n}) in torch.float32 on cpu; got ({rows}, "),
        (lambda x, n: torch.zeros(1, ROWS, n), "got (1, {rows}, {n}) in torch.float32"),
        (lambda x, n: torch.zeros(ROWS, n).bfloat16(), "got ({rows}, {n}) in torch.bfloat16 on cpu"),
        (lambda x, n: torch.zeros(ROWS, n, device="meta"), "got ({rows}, {n}) in torch.float32 on meta"),
        (lambda x, n: torch.zeros(n, ROWS).t(), "{name} has strides (1, {rows}); give a contiguous tensor"),
        (lambda x, n: torch.zeros(ROWS, n, requires_grad=True), "{name} requires a gradient; give a buffer without"),
        (lambda x, n: MX(None).quantize(torch.zeros(ROWS, n)), "{name} is a plain tensor ({rows}, {n}) to write to"),
        (lambda x, n: x.detach().as_strided((ROWS, n), (n, 1), 64), "{name} shares memory with the input"),
    ],
)
def test_buffers_that_do_not_fit_are_refused_before_anything_happens(make, message, name, width) -> None:
    m = grouped(recipes.load("nvfp4"))
    x = torch.randn(100, K)[:ROWS].requires_grad_()
    seed = m.duotone_seed.clone()
    with pytest.raises(UserError, match=re.escape(message.format(name=name, rows=ROWS, n=width))):
        m(x, SPLITS, **{name: make(x, width)})
    assert torch.equal(m.duotone_seed, seed)


@pytest.mark.parametrize(
    ("splits", "names", "message"),
    [
        ([9, 0, 30, 2], ("out",), f"m_splits sum to 41, and the input has {ROWS} rows"),
        ([9, 0, 29, 1], ("dgrad_out",), f"m_splits [9, 0, 29, 1] sum to 39, and the input has {ROWS} rows"),
        ([9, 31], ("out", "dgrad_out"), "m_splits needs 4 row counts"),
    ],
)
def test_splits_that_do_not_fit_leave_the_buffers_alone(splits, names, message) -> None:
    m = grouped(recipes.load("mxfp8"))
    places = dict(zip(("out", "dgrad_out"), buffers(m, (ROWS,)), strict=True))
    with pytest.raises(UserError, match=re.escape(message)):
        m(torch.randn(ROWS, K, requires_grad=True), splits, **{name: places[name] for name in names})
    assert all(bool((place == TAIL).all()) for place in places.values())
