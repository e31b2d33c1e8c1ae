"""High precision as a format: aliases, strides, dtypes."""

import torch
from tensor_cases import QUANTIZERS, every_dtype, pair, planes_of, same_bits, same_parts, snapshot

from duotone.compat import IdentityQuantizer
from duotone.compat.quantizers import Float8CurrentScalingQuantizer
from duotone.tensor import QuantizedTensor

ID = QUANTIZERS["identity"]


@every_dtype
def test_the_tensor_itself(dtype) -> None:
    """hybrid 69: an alias in both directions, in the dtype of the input."""
    x = torch.randn(8, 16).to(dtype)
    t = IdentityQuantizer()(x)
    assert t.dtype == dtype and t.rowwise_codes.data_ptr() == t.columnwise_codes.data_ptr() == x.data_ptr()
    assert t.columnwise_codes.shape == (16, 8) and same_bits(t.dequantize(), x) and t.planes.aliased
    t.mul_(2)
    assert same_bits(t.dequantize(), x)


def test_gradients_pass_as_those_of_every_format() -> None:
    """hybrid 69: one rule for all formats, so the result has an edge where the input needs a gradient."""
    x = torch.randn(8, 16, requires_grad=True)
    for handle in (IdentityQuantizer(), Float8CurrentScalingQuantizer()):
        x.grad = None
        handle(x).dequantize().sum().backward()
        assert torch.equal(x.grad, torch.ones(8, 16))
    assert not IdentityQuantizer()(x.detach()).requires_grad


def test_identity_planes_follow_from_each_other_and_obey_a_noop_flag() -> None:
    """hybrid 70: either plane follows from the other at no cost; a noop_flag keeps the values."""
    x = torch.randn(8, 16)
    t = ID.quantize(x.clone())
    t.update_usage(rowwise=False)
    t.update_usage(rowwise=True)
    assert t.planes.aliased and same_bits(t.dequantize(), x)
    t.quantize_(x + 1, noop_flag=torch.ones(1))
    assert same_bits(t.dequantize(), x)
    t.quantize_(x + 1, noop_flag=torch.zeros(1))
    assert same_bits(t.dequantize(), x + 1)


def test_the_dtype_follows_when_rebound_and_stays_when_written() -> None:
    """hybrid 70."""
    t = ID.quantize(torch.randn(8, 16).bfloat16())
    t.copy_(torch.full((8, 16), 1 / 3))
    assert t.dtype == t.rowwise_codes.dtype == torch.bfloat16
    x = torch.randn(8, 16)
    for new in (x, ID.quantize(x)):
        t.data = new
        assert t.dtype == t.rowwise_codes.dtype == torch.float32 and t.rowwise_codes.data_ptr() == x.data_ptr()


def test_views_and_pieces_keep_offsets_and_memory() -> None:
    """hybrid 71."""
    x = torch.randn(8, 16)
    t = ID.quantize(x)
    for cut in (
        lambda v: v.view(4, 32),
        lambda v: v[3:],
        lambda v: v[:, 5:9],
        lambda v: v.split([3, 5])[1],
        lambda v: v.as_strided((2, 16), (16, 1), 32),
        lambda v: v[2],
        lambda v: v.t(),
        lambda v: v[::3],
        lambda v: v.as_strided((3,), (20,), 1),
    ):
        result, want = cut(t), cut(x)
        assert result.shape == want.shape
        result.add_(1)
        assert same_bits(t.dequantize(), x) and same_bits(result * 1, want * 1)
        if isinstance(result, QuantizedTensor):
            assert result.rowwise_codes.data_ptr() == want.data_ptr()


def test_strided_input_stays_where_it_is() -> None:
    """hybrid 71; core 3."""
    base = torch.randn(16, 8)
    t = ID.quantize(base.t())
    assert t.rowwise_codes.stride() == (1, 8) and t.rowwise_codes.data_ptr() == base.data_ptr()
    assert t.stride() == (16, 1) and t.dequantize().is_contiguous() and same_bits(t.dequantize(), base.t())


def test_identity_beside_another_format() -> None:
    """core 19; hybrid 23: the values come from the Identity plane; a write refreshes both."""
    x, y = torch.randn(32, 64), torch.randn(32, 64)
    for q in (pair("mxfp8_e4m3", "identity"), pair("identity", "nvfp4_rht")):
        t = q.quantize(x.clone())
        assert same_bits(t.dequantize(), x)
        t.copy_(y)
        assert same_bits(t.dequantize(), y) and same_parts(snapshot(t), planes_of(q, y))
