"""The planes that lost most, why, and rules that give their GEMMs better formats, as a file to paste."""

from collections.abc import Sequence
from dataclasses import dataclass

from duotone import formats, recipes
from duotone.errors import UserError
from duotone.recipes.roles import GEMM_OF_PLANE, PLANES_OF_GEMM
from duotone.recipes.rules import DIRECTIONS
from duotone.recipes.tables import text_of
from duotone_lab.report.numbers import finite, number, share
from duotone_lab.training.schema import PlaneEntry, RunEntry

Plane = tuple[str, str, str]
"""Module, role, direction."""

MOST = 5
BETTER = 3.0
"""Decibels that another format must gain to be proposed; high precision is proposed otherwise."""


@dataclass(frozen=True)
class Weak:
    """A plane that lost much, the reason, and the formats of its GEMM, a and b, that would lose less."""

    entry: PlaneEntry
    gemm: str
    reason: str
    remedy: str
    operands: tuple[str, str]


def worst(run: RunEntry, others: Sequence[RunEntry], most: int = MOST) -> list[Weak]:
    """The planes of a run with the lowest signal-to-noise, the worst first."""
    lossy = [entry for entry in run["statistics"] if finite(entry["snr_db"])]
    lossy = [entry for entry in lossy if (entry["role"], entry["plane"]) in GEMM_OF_PLANE]
    lossy.sort(key=lambda entry: entry["snr_db"] or 0.0)
    return [_weak(entry, others) for entry in lossy[:most]]


def _weak(entry: PlaneEntry, others: Sequence[RunEntry]) -> Weak:
    gemm = GEMM_OF_PLANE[entry["role"], entry["plane"]]
    least = (entry["snr_db"] or 0.0) + BETTER
    best: tuple[float, str, tuple[str, str]] | None = None
    for other in others:
        planes = {_key(plane): plane for plane in other["statistics"]}
        pair = [planes.get((entry["module"], *side)) for side in PLANES_OF_GEMM[gemm]]
        signals = [side["snr_db"] for side in pair if side is not None and finite(side["snr_db"])]
        formats_read = tuple(side["format"] for side in pair if side is not None)
        if len(signals) == 2 and len(formats_read) == 2 and min(signals) > max(least, best[0] if best else least):
            best = min(signals), other["name"], formats_read
    if best is None:
        return Weak(
            entry, gemm, reason(entry), "high precision: no compared recipe does better", ("identity", "identity")
        )
    remedy = f"{' x '.join(dict.fromkeys(best[2]))} as in {best[1]}: {number(best[0], 1)} dB or more"
    return Weak(entry, gemm, reason(entry), remedy, best[2])


def reason(entry: PlaneEntry) -> str:
    """The reason for the loss of a plane, as far as its statistics show it."""
    causes = []
    if (entry["saturation"] or 0.0) > 0.001:
        causes.append(f"{share(entry['saturation'])} % of the elements exceed what their scale can hold")
    if (entry["underflow"] or 0.0) > 0.01:
        bits = entry.get("dynamic_range_bits")
        span = f": values span {number(bits)} powers of two" if finite(bits) else ""
        causes.append(f"{share(entry['underflow'])} % become zero{span}")
    try:
        described = formats.get(entry["format"].partition(",")[0]).describe()
    except UserError:
        described = {}
    if described.get("rounding") == "stochastic":
        causes.append("stochastic rounding, which trades noise for no bias")
    if described:
        causes.append(f"{described['element']} under a scale for each {described['block']} has no more precision")
    return "; ".join(causes[:2])


def rules(run: RunEntry, weak: Sequence[Weak]) -> str:
    """A recipe file, TOML: the run's recipe, with better formats for the GEMMs of those planes."""
    current = {_key(entry): entry["format"] for entry in run["statistics"]}
    changed: dict[Plane, str] = {}
    for plane in weak:
        for side, name in zip(PLANES_OF_GEMM[plane.gemm], plane.operands, strict=True):
            changed[plane.entry["module"], *side] = name
    base = run["name"] if run["name"] in recipes.names() else f"{run['name']}.toml"
    planes = current | changed
    tables = [
        {"module": module, "tensor_type": role}
        | {side: planes.get((module, role, side), "identity") for side in DIRECTIONS}
        for module, role in dict.fromkeys((module, role) for module, role, _ in changed)
    ]
    return text_of({"name": f"{run['name']}-mended", "base": base, "rules": tables})


def _key(entry: PlaneEntry) -> Plane:
    return entry["module"], entry["role"], entry["plane"]
