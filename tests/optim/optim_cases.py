"""Quantized parameters of every kind, gradients, and bytes to compare."""

import torch
from torch import Tensor, nn

from duotone import Quantizer, formats
from duotone.modules.weights import quantized_parameter


def pair(row: str, col: str | None = None, source: str = "original") -> Quantizer:
    return Quantizer(formats.get(row), formats.get(col or row), source)


QUANTIZERS = {
    "current": pair("fp8_e4m3_tensor"),
    "delayed": pair("fp8_e4m3_delayed"),
    "row": pair("fp8_e4m3_row"),
    "1x128": pair("fp8_e4m3_1x128"),
    "128x128": pair("fp8_e4m3_128x128"),
    "mxfp8": pair("mxfp8_e4m3"),
    "nvfp4": pair("nvfp4"),
    "nvfp4_16x16": pair("nvfp4_16x16"),
    "mxfp8|identity": pair("mxfp8_e4m3", "identity"),
    "delayed|mxfp8": pair("fp8_e5m2_delayed", "mxfp8_e4m3"),
    "mxfp8>nvfp4": pair("mxfp8_e4m3", "nvfp4", "rowwise_dequantized"),
    "identity": pair("identity"),
}
RATES = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def random_parameter(
    quantizer: Quantizer, shape: tuple[int, ...] = (48, 80), dtype: torch.dtype = torch.bfloat16, preserve: bool = False
) -> nn.Parameter:
    return quantized_parameter(nn.Parameter(torch.randn(shape, dtype=dtype)), quantizer, preserve=preserve)


def bits(x: Tensor) -> Tensor:
    """The bytes of a tensor, so that NaN equals NaN and -0 differs from 0."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def parts(t: Tensor) -> dict[str, Tensor]:
    """Every buffer of a quantized tensor, by name."""
    sides = zip(("row", "col"), t.planes, strict=True)
    return {f"{side} {name}": part for side, plane in sides if plane is not None for name, part in plane.parts.items()}


def everything(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of all bytes that a step may change."""
    results = {}
    for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        results |= (
            {f"{i} {name}": part.clone() for name, part in parts(p).items()}
            if hasattr(p, "planes")
            else {f"{i}": p.detach().clone()}
        )
        results |= {f"{i} {name}": value.clone() for name, value in optimizer.state[p].items()}
    return results


def all_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)
