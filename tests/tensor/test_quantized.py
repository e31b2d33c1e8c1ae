"""QuantizedTensor: truth about its planes, atomic requests, and plain results for everything else."""

import pytest
import torch

from duotone import Quantizer, formats
from duotone.compat.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from duotone.errors import MissingPlaneError, UserError
from duotone.tensor import BOTH, QuantizedTensor, Usage

MX = Quantizer(formats.get("mxfp8_e4m3"), formats.get("mxfp8_e4m3"))
FP8 = Quantizer(formats.get("fp8_e4m3_tensor"), formats.get("fp8_e4m3_tensor"))
HYBRID = Quantizer(formats.get("nvfp4"), formats.get("mxfp8_e4m3"))


def quantize(x: torch.Tensor, quantizer: Quantizer, usage: Usage = BOTH) -> QuantizedTensor:
    return quantizer.quantize(x, usage=usage)


def parts(t: QuantizedTensor) -> list[torch.Tensor]:
    return [part for plane in t.planes if plane is not None for part in plane.parts.values()]


def same(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    return all(torch.equal(x, y) for x, y in zip(parts(a), parts(b), strict=True))


@pytest.mark.parametrize("usage", [Usage(True, True), Usage(True, False), Usage(False, True)])
@pytest.mark.parametrize("shape", [(32, 64), (2, 16, 64), (64,), (0, 64)])
def test_shape_dtype_and_usages_are_the_logical_ones(usage, shape) -> None:
    t = quantize(torch.randn(shape).bfloat16(), MX, usage)
    assert (t.shape, t.dtype, t.size(-1), t.numel()) == (
        torch.Size(shape),
        torch.bfloat16,
        64,
        torch.Size(shape).numel(),
    )
    assert t.get_usages() == usage._asdict()
    assert t.dequantize().shape == t.shape and t.dequantize(torch.float32).dtype == torch.float32
    assert "mxfp8_e4m3" in repr(t)


def test_dequantize_prefers_the_more_precise_plane() -> None:
    x = torch.randn(32, 64)
    t = quantize(x, HYBRID)
    assert torch.equal(t.dequantize(), t.planes.columnwise.dequantize(torch.float32).t())
    t = quantize(x, MX)
    assert torch.equal(t.dequantize(), t.planes.rowwise.dequantize(torch.float32))


def test_update_usage_drops_keeps_and_derives() -> None:
    x = torch.randn(32, 64)
    t = quantize(x, FP8)
    t.update_usage(rowwise=False)
    assert t.get_usages() == {"rowwise": False, "columnwise": True}
    t.update_usage(rowwise=True)
    assert same(t, quantize(x, FP8))


def test_a_failing_update_usage_changes_nothing() -> None:
    t = quantize(torch.randn(32, 64), MX, Usage(True, False))
    for request in ({"rowwise": False, "columnwise": True}, {"columnwise": True}):
        with pytest.raises(MissingPlaneError):
            t.update_usage(**request)
        assert t.get_usages() == {"rowwise": True, "columnwise": False}


def test_quantize_in_place_refreshes_every_held_plane_and_keeps_addresses() -> None:
    t = quantize(torch.randn(32, 64), MX)
    before = [part.data_ptr() for part in parts(t)]
    x = torch.randn(32, 64)
    assert t.quantize_(x) is t
    assert [part.data_ptr() for part in parts(t)] == before
    assert same(t, quantize(x, MX))
    with pytest.raises(UserError, match="cannot write shape"):
        t.quantize_(torch.randn(64, 32))


def test_in_place_arithmetic_dequantizes_computes_and_requantizes() -> None:
    t = quantize(torch.randn(32, 64), MX)
    expected = quantize(t.dequantize() * 3 + 1, MX)
    t.mul_(3).add_(1)
    assert isinstance(t, QuantizedTensor)
    # Two writes round twice; the second starts from the rounded product.
    twice = quantize(torch.randn(32, 64), MX)
    start = twice.dequantize()
    twice.mul_(3)
    assert same(twice, quantize(start * 3, MX))
    assert torch.allclose(t.dequantize(), expected.dequantize(), rtol=2**-3, atol=2**-3)
    torch._foreach_add_([t, twice], 1.0)
    t.zero_()
    assert not t.dequantize().any()


def test_copy_in_all_directions() -> None:
    x = torch.randn(32, 64)
    a, b, other = quantize(x, MX), quantize(torch.randn(32, 64), MX), quantize(torch.randn(32, 64), FP8)
    assert same(b.copy_(a), a)
    b.copy_(x * 2)
    assert same(b, quantize(x * 2, MX))
    b.copy_(other)
    assert same(b, quantize(other.dequantize(), MX))
    plain = torch.empty(32, 64).copy_(a)
    assert type(plain) is torch.Tensor and torch.equal(plain, a.dequantize())


def test_clone_is_deep_and_detach_shares() -> None:
    t = quantize(torch.randn(32, 64), MX)
    clone, detached = t.clone(), t.detach()
    assert isinstance(clone, QuantizedTensor) and isinstance(detached, QuantizedTensor)
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(parts(clone), parts(t), strict=True))
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(parts(detached), parts(t), strict=True))
    saved = clone.dequantize()
    t.zero_()
    assert torch.equal(clone.dequantize(), saved)


@pytest.mark.parametrize("shape", [(32, 64), (-1,), (32, 32, 2), (2, -1, 64)])
def test_every_view_stays_quantized(shape) -> None:
    t = quantize(torch.randn(4, 8, 64), MX)
    view = t.view(shape)
    assert isinstance(view, QuantizedTensor) and torch.equal(view.dequantize(), t.dequantize().view(shape))
    view.mul_(2)
    assert torch.equal(t.dequantize(), view.dequantize().view(4, 8, 64))


def test_other_operations_give_plain_tensors_of_the_dequantized_values() -> None:
    t, x = quantize(torch.randn(32, 64), MX), torch.randn(64, 8)
    for result, want in (
        (t @ x, t.dequantize() @ x),
        (t + 1, t.dequantize() + 1),
        (t.sum(), t.dequantize().sum()),
    ):
        assert type(result) is torch.Tensor and torch.equal(result, want)
    assert type(t.to(torch.bfloat16)) is torch.Tensor
    assert torch.equal(t.to(torch.bfloat16), t.dequantize().to(torch.bfloat16))


def test_a_tensor_without_planes_knows_its_shape_and_has_no_values() -> None:
    """hybrid 9, 22."""
    t = quantize(torch.randn(4, 4), MX, Usage(False, False))
    dropped = quantize(torch.randn(4, 4), HYBRID)
    dropped.update_usage(rowwise=False, columnwise=False)
    for shell in (t, dropped):
        assert shell.shape == (4, 4) and shell.size(-1) == 4 and "no planes" in repr(shell)
        with pytest.raises(MissingPlaneError, match="holds no plane"):
            shell.dequantize()
        with pytest.raises(MissingPlaneError, match="no rowwise plane"):
            shell.update_usage(rowwise=True)


@pytest.mark.parametrize(
    ("handle", "row", "col"),
    [
        (IdentityQuantizer(), "identity", "identity"),
        (Float8CurrentScalingQuantizer("e5m2"), "fp8_e5m2_tensor", "fp8_e5m2_tensor"),
        (
            Float8CurrentScalingQuantizer(force_pow_2_scales=True),
            "fp8_e4m3_tensor_pow2",
            "fp8_e4m3_tensor_pow2",
        ),
        (Float8BlockQuantizer(block_scaling_dim=1), "fp8_e4m3_1x128", "fp8_e4m3_1x128"),
        (Float8BlockQuantizer(force_pow_2_scales=False), "fp8_e4m3_128x128_fp32", "fp8_e4m3_128x128_fp32"),
        (MXFP8Quantizer(with_2d_quantization=True), "mxfp8_e4m3_32x32", "mxfp8_e4m3_32x32"),
        (NVFP4Quantizer(with_rht=True, stochastic_rounding=True), "nvfp4_sr", "nvfp4_rht_sr"),
        (
            HybridQuantizer(rowwise_quantizer=MXFP8Quantizer(), columnwise_quantizer=NVFP4Quantizer(with_rht=True)),
            "mxfp8_e4m3",
            "nvfp4_rht",
        ),
    ],
)
def test_vocabulary_names_the_formats_it_promises(handle, row, col) -> None:
    assert (handle.value.rowwise.name, handle.value.columnwise.name) == (row, col)


def test_handles_change_usages_of_later_calls_only() -> None:
    handle = MXFP8Quantizer()
    x = torch.randn(32, 64)
    first = handle(x)
    handle.set_usage(columnwise=False)
    assert first.get_usages() == {"rowwise": True, "columnwise": True}
    assert handle(x).get_usages() == {"rowwise": True, "columnwise": False}
    assert handle == MXFP8Quantizer() and hash(handle) == hash(MXFP8Quantizer())
    handle.set_usage(columnwise=True)
    assert handle.quantize(x * 2, out=first) is first and same(first, quantize(x * 2, MX))
    copy = handle.copy()
    copy.set_usage(rowwise=False)
    assert handle.get_usages()["rowwise"]


def test_hybrid_children_must_be_quantizers() -> None:
    with pytest.raises(TypeError, match="columnwise_quantizer must be a quantizer; got str"):
        HybridQuantizer(rowwise_quantizer=MXFP8Quantizer(), columnwise_quantizer="nvfp4")
