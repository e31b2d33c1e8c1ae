"""Quantizers of every kind, the planes that formats alone would make for them, and bytes to compare."""

import pytest
import torch
from torch import Tensor

from duotone import Quantizer, formats
from duotone.formats import Parts
from duotone.tensor import BOTH, QuantizedTensor, Usage

get = formats.get


def pair(row: str, col: str | None = None, source: str = "original") -> Quantizer:
    return Quantizer(get(row), get(col or row), source)


QUANTIZERS = {
    "identity": pair("identity"),
    "fp8": pair("fp8_e4m3_tensor"),
    "fp8_delayed": pair("fp8_e4m3_delayed"),
    "fp8_row": pair("fp8_e4m3_row"),
    "1x128": pair("fp8_e4m3_1x128"),
    "128x128": pair("fp8_e4m3_128x128"),
    "mxfp8": pair("mxfp8_e4m3"),
    "mxfp8_32x32": pair("mxfp8_e4m3_32x32"),
    "nvfp4": pair("nvfp4"),
    "nvfp4_16x16": pair("nvfp4_16x16"),
    "nvfp4_rht": pair("nvfp4", "nvfp4_rht"),
    "nvfp4_row": pair("nvfp4_row"),
    "nvfp4|mxfp8": pair("nvfp4", "mxfp8_e4m3"),
    "mxfp8|identity": pair("mxfp8_e4m3", "identity"),
    "identity|nvfp4": pair("identity", "nvfp4_rht"),
    "fp8|128x128": pair("fp8_e4m3_tensor", "fp8_e4m3_128x128"),
    "delayed|mxfp8": pair("fp8_e5m2_delayed", "mxfp8_e4m3"),
    "mxfp8>nvfp4": pair("mxfp8_e4m3", "nvfp4", "rowwise_dequantized"),
}
ROW, COLUMN = Usage(True, False), Usage(False, True)
USAGES = {"row": ROW, "col": COLUMN, "both": BOTH}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HIGH = ("identity", "mxfp8|identity", "identity|nvfp4")

every_quantizer = pytest.mark.parametrize("q", QUANTIZERS.values(), ids=QUANTIZERS.keys())
every_usage = pytest.mark.parametrize("usage", USAGES.values(), ids=USAGES.keys())
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))

Expected = tuple[Parts | None, Parts | None]


def planes_of(q: Quantizer, x: Tensor, usage: Usage = BOTH, nominal: torch.dtype | None = None) -> Expected:
    """The parts of both planes of a matrix, out of nothing but the formats; `nominal` is x's dtype unless given."""
    row = q.rowwise.encode(x)
    source = x if q.columnwise_source == "original" else values_of(q.rowwise, row, x.to(nominal or x.dtype))
    col = (
        q.columnwise.derive(q.columnwise.encode(source), x.shape[1])
        if q.columnwise.is_derivable
        else q.columnwise.encode(source.t().contiguous(), plane="col")
    )
    return (row if usage.rowwise else None), (col if usage.columnwise else None)


def values_of(fmt: formats.Format, parts: Parts, like: Tensor) -> Tensor:
    """The matrix for which encoded parts stand, in the dtype and with the columns of `like`."""
    return fmt.unrotate(fmt.decode(parts, torch.float32), like.shape[1])[:, : like.shape[1]].to(like.dtype)


def parts_of(t: QuantizedTensor) -> Expected:
    row, col = t.planes
    return row and row.parts, col and col.parts


def bits(x: Tensor) -> Tensor:
    """The bytes of a tensor, so that NaN equals NaN and -0 differs from 0."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def same_parts(a: Expected, b: Expected) -> bool:
    for left, right in zip(a, b, strict=True):
        if (left is None) != (right is None):
            return False
        if left is not None and right is not None:
            if left.keys() != right.keys() or not all(same_bits(left[k], right[k]) for k in left):
                return False
    return True


def same(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """All bytes of both planes equal, and what the tensors pretend to be."""
    return (a.shape, a.dtype) == (b.shape, b.dtype) and same_parts(parts_of(a), parts_of(b))


def snapshot(t: QuantizedTensor) -> Expected:
    """A copy of every byte, to prove that a failing call changed none."""
    row, col = t.planes
    return (
        row and {k: v.clone() for k, v in row.parts.items()},
        col and {k: v.clone() for k, v in col.parts.items()},
    )


def addresses(t: QuantizedTensor) -> list[int]:
    return [p.data_ptr() for plane in t.planes if plane is not None for p in plane.parts.values()]


class Slot:
    """A delayed-scaling slot that counts what it records."""

    def __init__(self, scale: float = 2.0) -> None:
        self.scale, self.recorded = torch.tensor([scale]), []

    def scale_for(self, x: Tensor) -> Tensor:
        self.recorded.append(float(x.abs().max()) if x.numel() else 0.0)
        return self.scale
