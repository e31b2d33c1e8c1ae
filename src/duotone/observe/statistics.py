"""Statistics of what quantized planes lost: sums that stay on the device, and their summary."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from duotone.observe.sampling import Sampler, Slots
from duotone.recipes.roles import QuantizerRole
from duotone.recipes.rules import DIRECTIONS
from duotone.tensor.context import Slot
from duotone.tensor.plane import Plane, Planes

FIELDS = (
    *("signal", "noise", "nonzero", "underflowed", "saturated", "elements", "decoded", "magnitude", "drift"),
    *("nan", "inf"),
)
"""Sums over the finite elements of all samples: x^2, (x - x_q)^2, four counts, x_q^2, |x|, x_q - x. Then two counts."""


def measure(x: Tensor, plane: Plane) -> tuple[Tensor, Tensor]:
    """float64 sums in the order of `FIELDS`, and extremes: (largest, minus the smallest nonzero) magnitude.

    Elements that are not finite are counted and left out. If all others are zero, the extremes are (0, -inf). Sums of
    several samples add up; extremes take the maximum. Signal and noise are those of the matrix itself. Saturation is
    counted on the values that become codes, after any rotation. Nothing is read back to the host.
    """
    coded = plane.format.rotate(x).to(torch.float32).abs()
    saturated = (coded > plane.format.ceiling(plane.parts)[:, : coded.shape[1]]) & torch.isfinite(coded)
    sums, extremes = tally(x[None], plane.dequantize(torch.float32)[None], saturated[None])
    return sums[0], extremes[0]


def tally(x: Tensor, decoded: Tensor, saturated: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """The sums and extremes of `measure`, (n, fields) and (n, 2), of n samples: x, x_q and bool, (n, ...) each.

    Errors are computed in `dtype` and summed in float64.
    """
    finite, within = torch.isfinite(x), tuple(range(1, x.dim()))
    original = torch.where(finite, x, 0).to(dtype)
    decoded = torch.where(finite, decoded, 0).to(dtype)
    error, magnitude, nonzero = decoded - original, original.abs(), original != 0
    terms = (
        *(original.square(), error.square(), nonzero, nonzero & (decoded == 0), saturated, finite),
        *(decoded.square(), magnitude, error, torch.isnan(x), torch.isinf(x)),
    )
    sums = torch.stack([term.sum(within, dtype=torch.float64) for term in terms], -1)
    if x.numel() == 0:
        return sums, sums.new_tensor([0.0, -math.inf]).expand(len(x), 2)
    smallest = torch.where(nonzero, magnitude, math.inf).amin(within)
    return sums, torch.stack([magnitude.amax(within), -smallest], -1).to(torch.float64)


def summary(sums: list[float], extremes: list[float]) -> dict[str, float | None]:
    """The columns of a report: shares, decibels and bits. `snr_db` is None if nothing was lost, -inf where a finite
    element became infinite; `dynamic_range_bits`, `bias` and `cosine` are None if nothing was nonzero."""
    total = dict.fromkeys(FIELDS, 0.0) | dict(zip(FIELDS, sums, strict=False))  # older taps have the first six
    largest, smallest = extremes[0], -extremes[1]
    snr = None
    if total["noise"] > 0 < total["signal"]:
        ratio = total["signal"] / total["noise"]
        snr = 10.0 * math.log10(ratio) if ratio > 0 else -math.inf
    return {
        "snr_db": snr,
        "underflow": total["underflowed"] / max(1.0, total["nonzero"]),
        "saturation": total["saturated"] / max(1.0, total["elements"]),
        "bias": total["drift"] / total["magnitude"] if total["magnitude"] > 0 else None,
        "cosine": _cosine(total["signal"], total["decoded"], total["noise"]),
        "nan": int(total["nan"]),
        "inf": int(total["inf"]),
        "amax": largest,
        "dynamic_range_bits": math.log2(largest) - math.log2(smallest) if largest > 0 else None,
    }


def _cosine(signal: float, decoded: float, noise: float) -> float | None:
    """The cosine of x and x_q, from their squared norms and that of their difference. None if x or x_q is zero."""
    if not signal > 0 < decoded or math.isinf(noise):
        return None
    return (signal + decoded - noise) / (2 * math.sqrt(signal) * math.sqrt(decoded))


Key = tuple[str, str, str, str]
COLUMNS = ("module", "role", "plane", "format")
"""The names of the parts of a key in rows."""


EVENTS = ("amaxes_skipped", "spikes_clamped")


@dataclass
class Entry:
    """The statistics of one key: sums and extremes of `measure`, over `samples` samples."""

    sums: Tensor
    extremes: Tensor
    samples: int = 1
    slot: Slot | None = None
    """The source of the plane's delayed scale, unless the other plane has it."""


@dataclass(eq=False, repr=False)
class Tap(Sampler):
    """Running statistics for each (module, tensor, direction). `rows` may be called at any time."""

    _entries: dict[Key, Entry] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Tap({len(self._entries)} rows)"

    def take(self, role: QuantizerRole, x: Tensor, planes: Planes, slots: Slots) -> None:
        for direction, matrix, plane, slot in zip(DIRECTIONS, (x, x.t()), planes, slots, strict=True):
            if plane is not None:
                self.record(role, direction, matrix, plane, slot)

    def record(self, role: QuantizerRole, direction: str, x: Tensor, plane: Plane, slot: Slot | None = None) -> None:
        """Add one quantized plane of the 2-D tensor `x`, which is oriented as the plane is; `slot` has scaled it."""
        key = (role.name, role.tensor_type, direction, plane.format.name)
        sums, extremes = measure(x, plane)
        entry = self._entries.get(key)
        if entry is None:
            self._entries[key] = Entry(sums, extremes, slot=slot)
            return
        entry.sums = entry.sums + sums
        entry.extremes = torch.maximum(entry.extremes, extremes)
        entry.samples += 1
        entry.slot = slot

    def rows(self) -> list[dict[str, Any]]:
        """One row per module, role, plane and format, in order of first use.

        - `snr_db`: the ratio of signal to noise. None if nothing was lost.
        - `underflow`: the share of nonzero elements that became 0.
        - `saturation`: the share of elements larger than their scale can represent.
        - `bias`: the sum of the errors over the sum of the magnitudes. `cosine`: between the tensor and its codes.
        - `nan`, `inf`: how many elements were. All other numbers leave them out.
        - `amax`: the largest finite magnitude. `dynamic_range_bits`: log2 of amax over the smallest nonzero magnitude,
          None if all was 0.
        - `amaxes_skipped`, `spikes_clamped`: amaxes that did not enter the history of a delayed scale unchanged, in all
          steps so far. They count once if both planes share the scale.
        """
        return [
            {
                **dict(zip(COLUMNS, key, strict=True)),
                **summary(entry.sums.tolist(), entry.extremes.tolist()),
                "samples": entry.samples,
                **dict(zip(EVENTS, entry.slot.events() if entry.slot is not None else (0, 0), strict=True)),
            }
            for key, entry in self._entries.items()
        ]
