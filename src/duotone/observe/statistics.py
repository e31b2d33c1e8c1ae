"""What one quantization lost: sums and extremes of a matrix and its plane, computed where the data is."""

import math

import torch
from torch import Tensor

from duotone.tensor.plane import Plane

FIELDS = ("signal", "noise", "nonzero", "underflowed", "saturated", "elements")
"""Sums over the finite elements of all samples: x^2, (x - x_q)^2, counts."""


def measure(x: Tensor, plane: Plane) -> tuple[Tensor, Tensor]:
    """float64 sums in the order of `FIELDS`, and extremes: (largest, minus the smallest nonzero) magnitude.

    Elements that are not finite are left out; without a nonzero one the extremes are (0, -inf). Sums of several
    samples add, extremes take the maximum. Signal and noise are those of the matrix itself; saturation is judged where
    the codes are, after any rotation. Reads nothing back to the host.
    """
    finite = torch.isfinite(x)
    original = torch.where(finite, x, 0).to(torch.float64)
    decoded = torch.where(finite, plane.dequantize(torch.float32), 0).to(torch.float64)
    coded = plane.format.rotate(x).to(torch.float32).abs()
    saturated = (coded > plane.format.ceiling(plane.parts)[:, : coded.shape[1]]) & torch.isfinite(coded)
    nonzero = original != 0
    sums = torch.stack(
        [
            original.square().sum(),
            (original - decoded).square().sum(),
            nonzero.sum().to(torch.float64),
            (nonzero & (decoded == 0)).sum().to(torch.float64),
            saturated.sum().to(torch.float64),
            finite.sum().to(torch.float64),
        ]
    )
    return sums, _extremes(original.abs(), nonzero)


def _extremes(magnitude: Tensor, nonzero: Tensor) -> Tensor:
    if magnitude.numel() == 0:
        return torch.stack([magnitude.new_zeros(()), magnitude.new_full((), -math.inf)])
    return torch.stack([magnitude.amax(), -torch.where(nonzero, magnitude, math.inf).amin()])


def summary(sums: list[float], extremes: list[float]) -> dict[str, float | None]:
    """The columns of a report: shares, decibels and bits. `snr_db` is None where nothing was lost, -inf where a finite
    element became infinite; `dynamic_range_bits` is None where nothing was nonzero."""
    total = dict(zip(FIELDS, sums, strict=True))
    largest, smallest = extremes[0], -extremes[1]
    snr = None
    if total["noise"] > 0 < total["signal"]:
        ratio = total["signal"] / total["noise"]
        snr = 10.0 * math.log10(ratio) if ratio > 0 else -math.inf
    return {
        "snr_db": snr,
        "underflow": total["underflowed"] / max(1.0, total["nonzero"]),
        "saturation": total["saturated"] / max(1.0, total["elements"]),
        "amax": largest,
        "dynamic_range_bits": math.log2(largest) - math.log2(smallest) if largest > 0 else None,
    }
