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
    *("signal", "noise", "nonzero", "underflowed", "saturated", "clipped", "elements", "decoded", "magnitude", "drift"),
    *("nan", "inf"),
)
"""Sums over the finite elements of all samples: x^2, (x - x_q)^2, five counts, x_q^2, |x|, x_q - x. Then two counts."""

EXTREMES = ("amax", "smallest", "coded", "limit", "smallest_limit")
"""The largest magnitude and minus the smallest nonzero one; the largest after any rotation; the extremes of limits.

All are finite. Where there is none, the smallest are -inf and the others 0.
"""

CLIPPED = 1.5
"""Elements above so many times the limit count as clipped: rounded scales leave largest ones a little above it."""


def measure(x: Tensor, plane: Plane) -> tuple[Tensor, Tensor]:
    """Return float64 sums in the order of `FIELDS`, and extremes in that of `EXTREMES`.

    Elements that are not finite are counted and left out. Sums of several samples add up; extremes take the maximum.
    Signal and noise are those of the matrix itself. Saturation is counted on the values that become codes, after any
    rotation. Nothing is read back to the host.
    """
    coded = plane.format.rotate(x).to(torch.float32)
    ceiling = plane.format.ceiling(plane.parts)[:, : coded.shape[1]]
    sums, extremes = tally(x[None], plane.dequantize(torch.float32)[None], coded[None], ceiling[None])
    return sums[0], extremes[0]


def tally(
    x: Tensor, decoded: Tensor, coded: Tensor, ceiling: Tensor, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Return the sums and extremes of `measure`, (n, fields) and (n, extremes), of n samples.

    x, x_q, the values that become codes and their limits are (n, ...) each. Errors are computed in `dtype` and summed
    in float64.
    """
    finite, within = torch.isfinite(x), tuple(range(1, x.dim()))
    coded = torch.where(torch.isfinite(coded), coded, 0).abs()
    original = torch.where(finite, x, 0).to(dtype)
    decoded = torch.where(finite, decoded, 0).to(dtype)
    error, magnitude, nonzero = decoded - original, original.abs(), original != 0
    terms = (
        *(original.square(), error.square(), nonzero, nonzero & (decoded == 0)),
        *(coded > ceiling, coded > CLIPPED * ceiling, finite),
        *(decoded.square(), magnitude, error, torch.isnan(x), torch.isinf(x)),
    )
    sums = torch.stack([term.sum(within, dtype=torch.float64) for term in terms], -1)
    if x.numel() == 0:
        return sums, sums.new_tensor([0.0, -math.inf, 0.0, 0.0, -math.inf]).expand(len(x), len(EXTREMES))
    smallest = torch.where(nonzero, magnitude, math.inf).amin(within)
    limits = torch.where(torch.isfinite(ceiling), ceiling, 0)
    extremes = magnitude.amax(within), -smallest, coded.amax(within), limits.amax(within), -limits.amin(within)
    return sums, torch.stack([each.double() for each in extremes], -1)


def decibels(signal: float, noise: float) -> float | None:
    """Return signal over noise in dB: None if one of them is 0, -inf for infinite noise."""
    if not noise > 0 < signal:
        return None
    return 10.0 * math.log10(signal / noise) if noise < math.inf else -math.inf


def summary(sums: list[float], extremes: list[float]) -> dict[str, float | None]:
    """Return the columns of a report: shares, decibels and bits.

    `snr_db` is None if nothing was lost, -inf where a finite element became infinite; `dynamic_range_bits`, `bias` and
    `cosine` are None if nothing was nonzero.
    """
    total = dict(zip(FIELDS, sums, strict=True))
    largest, smallest = extremes[0], -extremes[1]
    return {
        "snr_db": decibels(total["signal"], total["noise"]),
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

    def record(
        self, role: QuantizerRole, direction: str, x: Tensor, plane: Plane, slot: Slot | None = None
    ) -> tuple[Tensor, Tensor]:
        """Add one quantized plane of the 2-D tensor `x`, which is oriented as the plane is; `slot` has scaled it.

        Returns what `measure` does.
        """
        sums, extremes = measured = measure(x, plane)
        key = (role.name, role.tensor_type, direction, plane.format.name)
        if (before := self._entries.get(key)) is not None:
            sums, extremes = before.sums + sums, torch.maximum(before.extremes, extremes)
        self._entries[key] = Entry(sums, extremes, 1 if before is None else before.samples + 1, slot)
        return measured

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
