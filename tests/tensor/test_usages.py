"""update_usage, materialize_usage and dequantize: what is held, what follows without loss, what it is worth."""

import pytest
import torch
from tensor_cases import (
    BOTH,
    COLUMN,
    QUANTIZERS,
    ROW,
    every_dtype,
    every_quantizer,
    every_usage,
    pair,
    planes_of,
    same,
    same_bits,
    same_parts,
    snapshot,
    values_of,
)

from duotone.errors import MissingPlaneError
from duotone.tensor import Usage

REQUESTS = [(row, col) for row in (None, False, True) for col in (None, False, True)]
LOSSLESS = ("identity", "fp8", "fp8_delayed", "128x128", "mxfp8_32x32", "nvfp4_16x16")
"""One encoding for both planes: either follows from the other."""


@pytest.mark.parametrize("name", QUANTIZERS)
@every_usage
def test_update_usage_derives_drops_or_refuses_planes(name, usage) -> None:
    """core 24, 25, 26; hybrid 22: keep, drop and demand; derived bits are encoded bits; a failure changes nothing."""
    for request_ in REQUESTS:
        q, x = QUANTIZERS[name], torch.randn(32, 64)
        t = q.quantize(x, usage=usage)
        before = snapshot(t)
        after = Usage(*(present if want is None else want for present, want in zip(usage, request_, strict=True)))
        missing = [want and not present for present, want in zip(usage, request_, strict=True)]
        if any(missing) and not (name in LOSSLESS and any(usage)):
            with pytest.raises(MissingPlaneError, match="materialize_usage") as error:
                t.update_usage(*request_)
            assert "\n" not in str(error.value) and t.get_usages() == usage._asdict()
            assert same_parts(snapshot(t), before)
        else:
            t.update_usage(*request_)
            assert t.get_usages() == after._asdict() and same(t, q.quantize(x, usage=after))


@pytest.mark.parametrize("shape", [(17, 33), (1, 5), (48, 80)], ids=str)
@pytest.mark.parametrize("name", LOSSLESS)
def test_derived_planes_of_ragged_tensors(name, shape) -> None:
    """core 26: there and back."""
    q, x = QUANTIZERS[name], torch.randn(shape).bfloat16()
    t = q.quantize(x, usage=ROW)
    t.update_usage(columnwise=True)
    assert same(t, q.quantize(x))
    t.update_usage(rowwise=False)
    t.update_usage(rowwise=True)
    assert same(t, q.quantize(x))


def test_two_different_formats_never_follow_from_each_other() -> None:
    """hybrid 22: though the other format could be transposed, a later write would make another one."""
    for name, usage, missing in (("fp8|128x128", COLUMN, "rowwise"), ("identity|nvfp4", ROW, "columnwise")):
        t = QUANTIZERS[name].quantize(torch.randn(32, 64), usage=usage)
        with pytest.raises(MissingPlaneError, match=f"no {missing} plane and none follows"):
            t.update_usage(**{missing: True})
        assert same(t.zero_(), QUANTIZERS[name].quantize(torch.zeros(32, 64), usage=usage))


def test_a_derived_plane_shares_all_of_its_memory_or_nothing() -> None:
    """core 31; hybrid 15: rewriting one plane alone leaves the other one whole."""
    x, y = torch.randn(32, 64), 100 * torch.randn(32, 64)
    t = QUANTIZERS["nvfp4_16x16"].quantize(x)
    t.quantize_(y, usage=ROW)
    col = t.planes.columnwise.dequantize(torch.float32).t()
    assert torch.equal(col, QUANTIZERS["nvfp4_16x16"].quantize(x, usage=COLUMN).dequantize())


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4_rht", "nvfp4|mxfp8"])
def test_materialize_usage_requantizes_only_when_told(name) -> None:
    """core 24."""
    q, x = QUANTIZERS[name], torch.randn(32, 64)
    t = q.quantize(x, usage=ROW)
    with pytest.raises(MissingPlaneError):
        t.materialize_usage(columnwise=True)
    assert t.get_usages()["columnwise"] is False
    row = snapshot(t)[0]
    t.materialize_usage(columnwise=True, allow_requantize=True)
    decoded = values_of(q.rowwise, row, x)
    assert same_parts(snapshot(t), (row, planes_of(q, decoded, COLUMN)[1]))


def test_a_shell_knows_its_shape_and_refuses_the_rest() -> None:
    """core 29; hybrid 9, 22, 31: no value, no write, nothing like it; no write is lost in silence."""
    x = torch.randn(2, 16, 64)
    t = QUANTIZERS["nvfp4|mxfp8"].quantize(x, usage=Usage(False, False))
    assert (t.shape, t.size(-1), t.numel(), t.stride()) == (x.shape, 64, x.numel(), x.stride())
    for call in (
        t.dequantize,
        lambda: t + 1,
        lambda: t.copy_(x),
        lambda: t.quantize_(x),
        lambda: t.add_(1),
        lambda: t.new_zeros(3),
        lambda: torch.empty_like(t),
        lambda: t.new_empty(3),
        lambda: setattr(t, "data", x),
        lambda: t.update_usage(rowwise=True),
    ):
        with pytest.raises(MissingPlaneError, match=r"no planes\)"):
            call()
    assert "no planes" in repr(t) and not any(t.get_usages().values())


@every_quantizer
@every_usage
@every_dtype
def test_dequantize_reads_the_more_precise_plane_in_each_dtype(q, usage, dtype) -> None:
    """core 27; hybrid 23: nominal and explicit dtype, the more precise plane, and no quantizer needed."""
    x = torch.randn(2, 24, 80).to(dtype)
    matrix = x.reshape(48, 80)
    t = q.quantize(x, usage=usage)
    row, col = planes_of(q, matrix, usage)
    del t.quantizer
    for target in (None, torch.float32, torch.bfloat16):
        like = matrix.to(target or dtype)
        if row is not None and (col is None or q.rowwise.precision >= q.columnwise.precision):
            expected = values_of(q.rowwise, row, like)
        else:
            expected = values_of(q.columnwise, col, like.t()).t()
        result = t.dequantize(target)
        assert same_bits(result, expected.reshape(x.shape)) and result.is_contiguous()


@pytest.mark.parametrize(
    ("row", "col", "better"),
    [
        ("nvfp4", "mxfp8_e4m3", "columnwise"),
        ("mxfp8_e4m3", "nvfp4", "rowwise"),
        ("nvfp4", "identity", "columnwise"),
        ("mxfp6_e2m3", "fp8_e4m3_tensor", "columnwise"),
        ("mxfp4", "nvfp4", "rowwise"),
        ("fp8_e4m3_tensor", "mxfp8_e5m2", "rowwise"),
    ],
)
def test_dequantize_takes_the_more_precise_plane(row, col, better) -> None:
    """hybrid 23: Identity, then 8, 6 and 4 bits; on a tie the rowwise one."""
    x = torch.randn(32, 64)
    t = pair(row, col).quantize(x)
    other = {"rowwise": "columnwise", "columnwise": "rowwise"}[better]
    best = t.dequantize()
    t.update_usage(**{other: False})
    assert torch.equal(best, t.dequantize())


@every_quantizer
@every_usage
def test_gradients_pass_through(q, usage) -> None:
    """core 28: quantize, view and dequantize are identities to autograd, in each dtype of the gradient."""
    x = torch.randn(32, 64, requires_grad=True)
    t = q.quantize(x, usage=usage)
    assert t.requires_grad and not t.is_leaf and t.grad_fn is not None
    dy = torch.randn(16, 128)
    t.view(16, 128).dequantize().backward(dy)
    assert torch.equal(x.grad, dy.view(32, 64))
    x.grad = None
    q.quantize(x, usage=usage).dequantize(torch.bfloat16).backward(dy.view(32, 64).bfloat16())
    assert torch.equal(x.grad, dy.view(32, 64).bfloat16().float())
    x.grad = None
    (q.quantize(x, usage=usage) * 3).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0))
    assert not q.quantize(x.detach()).requires_grad and not q.quantize(x.detach()).dequantize().requires_grad


def test_gradients_of_a_leaf() -> None:
    """core 28, 32: views, slices, splits and plain fallbacks send gradients where they belong."""
    w = torch.nn.Parameter(QUANTIZERS["mxfp8"].quantize(torch.randn(64, 64)))
    for read in (
        lambda: w.dequantize()[:32],
        lambda: w[:32].dequantize(),
        lambda: w.split(32)[0].dequantize(),
        lambda: w.chunk(2)[0].dequantize(),
        lambda: w.narrow(0, 0, 32).dequantize(),
        lambda: w.as_strided((32, 64), (64, 1)).dequantize(),
        lambda: w.view(-1)[:2048],
        lambda: w.t()[:, :32],
        lambda: w.clone().dequantize()[:32],
    ):
        w.grad = None
        (read() * 2).sum().backward()
        assert type(w.grad) is torch.Tensor
        assert torch.equal(w.grad, torch.cat([torch.full((32, 64), 2.0), torch.zeros(32, 64)]))


@every_quantizer
@every_usage
@pytest.mark.parametrize("shape", [(32, 64), (2, 16, 64), (64,)], ids=str)
def test_what_the_tensor_pretends_to_be(q, usage, shape) -> None:
    """core 29, 45."""
    x = torch.randn(shape).half()
    t = q.quantize(x, usage=usage)
    assert (t.shape, t.size(), t.stride(), t.numel(), t.dim()) == (x.shape, x.size(), x.stride(), x.numel(), x.dim())
    assert [t.size(d) for d in range(-t.dim(), t.dim())] == [x.size(d) for d in range(-x.dim(), x.dim())]
    assert (t.dtype, t.device, t.is_contiguous(), len(t)) == (x.dtype, x.device, True, len(x))
    assert repr(t).startswith("QuantizedTensor(shape=") and str(t) == repr(t) == f"{t}"
    assert hasattr(t, "rowwise_codes") == usage.rowwise and not hasattr(t, "nothing")


def test_both_directions_of_one_source_may_differ() -> None:
    """core 27: columnwise values have scales of their own."""
    x = torch.randn(32, 64) * torch.logspace(-3, 3, 64)
    t = QUANTIZERS["mxfp8"].quantize(x)
    row = t.dequantize()
    t.update_usage(rowwise=False)
    assert not torch.equal(row, t.dequantize()) and BOTH.rowwise
