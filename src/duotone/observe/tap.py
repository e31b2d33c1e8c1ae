"""Statistics taps: a recipe that computes the same bits and records what they lost.

Run sampled steps under `autocast(recipe=tap(recipe, store))` and all others under the recipe itself. Sums stay on the
device, so a tapped step synchronises nothing; `Tap.rows` reads them.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from duotone.recipes.recipe import Recipe
from duotone.recipes.roles import QuantizerRole
from duotone.tensor.context import LOCAL, QuantizeContext
from duotone.tensor.plane import BOTH, Plane, Planes, Usage
from duotone.tensor.quantizer import Quantizer

FIELDS = ("signal", "noise", "nonzero", "underflowed", "saturated", "elements")
"""Sums over the finite elements of all samples: x^2, (x - x_q)^2, counts."""


class Tap:
    """Running sums for each (module, tensor, direction). `rows` may be called at any time."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str, str, str], Tensor] = {}
        self._amax: dict[tuple[str, str, str, str], Tensor] = {}
        self._samples: dict[tuple[str, str, str, str], int] = {}

    def record(self, role: QuantizerRole, direction: str, x: Tensor, plane: Plane) -> None:
        """Add one quantized plane of the 2-D tensor `x`, which is oriented as the plane is."""
        key = (role.name, role.tensor_type, direction, plane.format.name)
        sums, amax = measure(x, plane)
        if key in self._sums:
            sums, amax = self._sums[key] + sums, torch.maximum(self._amax[key], amax)
        self._sums[key], self._amax[key] = sums, amax
        self._samples[key] = self._samples.get(key, 0) + 1

    def rows(self) -> list[dict[str, Any]]:
        """One row per module, role and plane, in order of first use; `snr_db` is None where nothing was lost.

        `underflow` is the share of nonzero elements that became 0, `saturation` the share of elements larger than their
        scale can hold, `amax` the largest finite magnitude seen.
        """
        return [self._row(key) for key in self._sums]

    def _row(self, key: tuple[str, str, str, str]) -> dict[str, Any]:
        module, role, plane, fmt = key
        total = dict(zip(FIELDS, self._sums[key].tolist(), strict=True))
        snr = 10.0 * math.log10(total["signal"] / total["noise"]) if total["noise"] > 0 < total["signal"] else None
        return {
            "module": module,
            "role": role,
            "plane": plane,
            "format": fmt,
            "snr_db": snr,
            "underflow": total["underflowed"] / max(1.0, total["nonzero"]),
            "saturation": total["saturated"] / max(1.0, total["elements"]),
            "amax": self._amax[key].item(),
            "samples": self._samples[key],
        }


def measure(x: Tensor, plane: Plane) -> tuple[Tensor, Tensor]:
    """float64 sums in the order of `FIELDS`, and the fp32 amax; elements that are not finite are left out.

    Signal and noise are those of the matrix itself; saturation is judged where the codes are, after any rotation.
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
    amax = original.abs().amax() if original.numel() else original.new_zeros(())
    return sums, amax.to(torch.float32)


@dataclass(frozen=True)
class TappedQuantizer:
    """A quantizer that records each plane it makes. Equal to another where quantizer, role and store are."""

    inner: Quantizer
    role: QuantizerRole
    store: Tap

    @property
    def rowwise(self) -> Any:
        return self.inner.rowwise

    @property
    def columnwise(self) -> Any:
        return self.inner.columnwise

    @property
    def is_stochastic(self) -> bool:
        return self.inner.is_stochastic

    @property
    def history(self) -> Any:
        return self.inner.history

    @property
    def columnwise_source(self) -> str:
        return self.inner.columnwise_source

    @property
    def delayed(self) -> tuple[bool, bool]:
        return self.inner.delayed

    def encode(self, x: Tensor, usage: Usage = BOTH, ctx: QuantizeContext = LOCAL) -> Planes:
        planes = self.inner.encode(x, usage, ctx)
        with torch.no_grad():
            if planes.rowwise is not None:
                self.store.record(self.role, "rowwise", x, planes.rowwise)
            if planes.columnwise is not None:
                self.store.record(self.role, "columnwise", x.t(), planes.columnwise)
        return planes


@dataclass(frozen=True, kw_only=True)
class TappedRecipe(Recipe):
    """`inner` with taps on every quantizer that it returns."""

    inner: Recipe
    store: Tap

    @property
    def name(self) -> str:
        return self.inner.name

    def __call__(self, role: QuantizerRole) -> Any:
        return TappedQuantizer(self.inner(role), role, self.store)

    def to_dict(self) -> dict[str, Any]:
        return self.inner.to_dict()


def tap(recipe: Recipe, store: Tap) -> TappedRecipe:
    """The recipe with the same bits that records into `store`."""
    return TappedRecipe(inner=recipe, store=store, strict=recipe.strict, backward_override=recipe.backward_override)
