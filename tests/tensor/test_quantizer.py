"""Quantizers: only the planes asked for, derived where that is lossless, and the two columnwise sources."""

import pytest
import torch

from duotone import Quantizer, formats
from duotone.errors import UserError
from duotone.tensor import LOCAL, QuantizeContext, Usage, plane_encoder
from duotone.tensor.plane_encoder import encode_plane

get = formats.get


def count_encodes(monkeypatch) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    original = plane_encoder.encode_plane

    def counting(fmt, x, ctx=LOCAL, plane="row", stages=None):
        calls.append((fmt.name, plane))
        return original(fmt, x, ctx, plane, stages)

    monkeypatch.setattr(plane_encoder, "encode_plane", counting)
    return calls


@pytest.mark.parametrize("name", formats.names())
def test_columnwise_plane_is_the_encoding_of_the_transpose(name: str) -> None:
    x, seed = torch.randn(48, 80).bfloat16(), torch.tensor([4])
    col = Quantizer(get(name), get(name)).encode(x, ctx=QuantizeContext(seed=seed)).columnwise
    assert col.shape == (80, 48)
    if get(name).is_derivable:
        expected = get(name).derive(get(name).encode(x, seed=seed))
    else:
        expected = get(name).encode(x.t().contiguous(), seed=seed, plane="col")
    assert all(torch.equal(col.parts[part], value) for part, value in expected.items())


def test_only_requested_planes_are_computed(monkeypatch) -> None:
    calls = count_encodes(monkeypatch)
    x = torch.randn(32, 64)
    q = Quantizer(get("mxfp8_e4m3"), get("nvfp4_rht"))
    planes = q.encode(x, Usage(True, False))
    assert planes.columnwise is None and calls == [("mxfp8_e4m3", "row")]
    calls.clear()
    planes = q.encode(x, Usage(False, True))
    assert planes.rowwise is None and calls == [("nvfp4_rht", "col")]
    calls.clear()
    Quantizer(get("fp8_e4m3_tensor"), get("fp8_e4m3_tensor")).encode(x)
    assert calls == [("fp8_e4m3_tensor", "row")]


def test_columnwise_only_of_a_derivable_format_encodes_the_row_transiently(monkeypatch) -> None:
    calls = count_encodes(monkeypatch)
    x = torch.randn(32, 64)
    q = Quantizer(get("mxfp8_e4m3_32x32"), get("mxfp8_e4m3_32x32"))
    planes = q.encode(x, Usage(False, True))
    assert planes.rowwise is None and calls == [("mxfp8_e4m3_32x32", "row")]
    assert torch.equal(planes.columnwise.parts["codes"], q.encode(x).columnwise.parts["codes"])


@pytest.mark.parametrize("row", ["mxfp8_e4m3", "fp8_e4m3_tensor", "nvfp4", "nvfp4_rht"])
@pytest.mark.parametrize("col", ["nvfp4", "mxfp8_e4m3", "identity", "fp8_e4m3_tensor"])
@pytest.mark.parametrize("rowwise", [True, False])
def test_rowwise_dequantized_encodes_what_the_rowwise_plane_stands_for(row, col, rowwise) -> None:
    x = torch.randn(32, 64).bfloat16()
    planes = Quantizer(get(row), get(col), "rowwise_dequantized").encode(x, Usage(rowwise, True))
    decoded = encode_plane(get(row), x).dequantize(torch.bfloat16)
    expected = Quantizer(get(col), get(col)).encode(decoded, Usage(False, True)).columnwise
    assert (planes.rowwise is not None) == rowwise
    assert all(torch.equal(planes.columnwise.parts[k], v) for k, v in expected.parts.items())


def test_quantizers_are_values() -> None:
    q = Quantizer(get("mxfp8_e4m3"), get("nvfp4"))
    assert q == Quantizer(get("mxfp8_e4m3"), get("nvfp4")) and hash(q) == hash(
        Quantizer(get("mxfp8_e4m3"), get("nvfp4"))
    )
    assert q != Quantizer(get("mxfp8_e4m3"), get("nvfp4"), "rowwise_dequantized")
    assert q.with_usage(columnwise=False) == Quantizer(get("mxfp8_e4m3"), None)
    with pytest.raises(UserError, match="takes formats; got 'mxfp8_e4m3'"):
        Quantizer("mxfp8_e4m3")
    with pytest.raises(UserError, match="columnwise_source 'both' is unknown"):
        Quantizer(columnwise_source="both")


def test_identity_planes_alias_the_tensor() -> None:
    x = torch.randn(8, 16)
    planes = Quantizer().encode(x)
    assert planes.rowwise.parts["codes"] is x
    assert planes.columnwise.parts["codes"].data_ptr() == x.data_ptr()
    assert planes.columnwise.parts["codes"].shape == (16, 8)
