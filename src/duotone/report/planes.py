"""Statistics of quantized planes, arranged for heat maps and tables: role and plane across, modules down."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

from duotone.lab.schema import PlaneEntry, RunEntry
from duotone.report.heat_map import Cell, Column, Grid
from duotone.report.module_names import pattern
from duotone.report.numbers import finite, number, share, significant

COLUMNS: tuple[Column, ...] = tuple(
    (role, plane) for role in ("input", "weight", "grad_output") for plane in ("rowwise", "columnwise")
)
Share = Literal["underflow", "saturation"]
SHARES: tuple[Share, ...] = ("underflow", "saturation")
SHADES = (0.001, 0.01, 0.05, 0.2)
"""A share is shaded one step more above each of these."""


def is_exact(run: RunEntry) -> bool:
    """True for a run with statistics whose planes all hold their tensor unchanged."""
    return bool(run["statistics"]) and all(entry["snr_db"] is None for entry in run["statistics"])


def merged(statistics: Sequence[PlaneEntry]) -> list[PlaneEntry]:
    """One entry for all modules whose names differ in numbers alone: the worst value of each field.

    A NaN counts as the worst. `samples` and events are summed.
    """
    groups: dict[tuple[str, str, str], list[PlaneEntry]] = defaultdict(list)
    for entry in statistics:
        groups[pattern(entry["module"]), entry["role"], entry["plane"]].append(entry)
    result: list[PlaneEntry] = []
    for (module, role, plane), entries in groups.items():
        noise = _largest(-entry["snr_db"] for entry in entries if entry["snr_db"] is not None)
        result.append(
            {
                "module": module,
                "role": role,
                "plane": plane,
                "format": ", ".join(sorted({entry["format"] for entry in entries})),
                "samples": sum(entry["samples"] or 0 for entry in entries),
                "snr_db": None if noise is None else -noise,
                "underflow": _largest(entry["underflow"] for entry in entries),
                "saturation": _largest(entry["saturation"] for entry in entries),
                "amax": _largest(entry["amax"] for entry in entries),
                "amaxes_skipped": sum(_events(entry)[0] for entry in entries),
                "spikes_clamped": sum(_events(entry)[1] for entry in entries),
            }
        )
    return result


def signal_grid(statistics: Sequence[PlaneEntry]) -> Grid:
    """Signal-to-noise in dB per module and plane. An exact plane is a cell without colour."""
    cells = {}
    for entry in statistics:
        is_exact = entry["snr_db"] in (None, math.inf)
        shares = f"underflow {share(entry['underflow'])} %, saturation {share(entry['saturation'])} %"
        title = f"{entry['format']}, {shares}, amax {significant(entry['amax'])}, samples {entry['samples']}"
        value, text = (None, "exact") if is_exact else (entry["snr_db"], number(entry["snr_db"], 1))
        cells[entry["module"], _column(entry)] = Cell(value, text, title)
    return Grid(_modules(statistics), columns(statistics), cells)


def events(statistics: Sequence[PlaneEntry]) -> str:
    """How many amaxes did not enter their delayed history as they were, and in which module most; "" for none."""
    skipped, clamped = (sum(counts) for counts in zip((0, 0), *map(_events, statistics), strict=True))
    if not skipped and not clamped:
        return ""
    worst = max(statistics, key=lambda entry: sum(_events(entry)))
    parts = [f"{skipped} amaxes were not finite"] if skipped else []
    parts += [f"{clamped} were spikes and entered as less"] if clamped else []
    return f"delayed scaling: {', '.join(parts)}; most of them in {worst['module']} ({' '.join(_column(worst))})"


def share_grid(runs: Sequence[RunEntry], field: Share) -> Grid:
    """Mean over modules of `underflow` or `saturation` in percent, per run and plane; the worst module."""
    cells = {}
    for run in runs:
        groups: dict[Column, list[tuple[float, str]]] = defaultdict(list)
        for entry in run["statistics"]:
            if (value := entry[field]) is not None:
                groups[_column(entry)].append((value, entry["module"]))
        for column, shares in groups.items():
            mean = sum(value for value, _ in shares) / len(shares)
            worst, module = max(shares, key=lambda pair: _rank(pair[0]))
            title = f"{run['name']}, {' '.join(column)}: worst {share(worst)} % in {module}"
            cells[run["name"], column] = Cell(100.0 * mean, share(mean), title)
    every = [entry for run in runs for entry in run["statistics"]]
    return Grid([run["name"] for run in runs], columns(every), cells)


def share_rows(statistics: Sequence[PlaneEntry]) -> list[tuple[str, list[tuple[str, int]]]]:
    """Per module: underflow and saturation of each of the `columns`, as text in percent and a shade, 0 to 4."""
    shares = {(entry["module"], _column(entry)): [entry[field] for field in SHARES] for entry in statistics}
    rows = []
    for module in _modules(statistics):
        values = [value for column in columns(statistics) for value in shares.get((module, column), (None, None))]
        shades = [sum(value > limit for limit in SHADES) if finite(value) else 0 for value in values]
        rows.append((module, list(zip(map(share, values), shades, strict=True))))
    return rows


def columns(statistics: Sequence[PlaneEntry]) -> list[Column]:
    """The usual columns, then any other that occurs."""
    return [*COLUMNS, *sorted(set(map(_column, statistics)) - set(COLUMNS))]


def formats(statistics: Sequence[PlaneEntry]) -> list[tuple[str, str]]:
    """Each format and the planes that it was used for: `input rowwise, weight (both planes)`."""
    used: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for role, plane in columns(statistics):
        for name in sorted({entry["format"] for entry in statistics if _column(entry) == (role, plane)}):
            used[name][role].append(plane)
    if len(used) == 1:
        return [(name, "in all planes") for name in used]
    texts = []
    for name, roles in used.items():
        places = (f"{role} {planes[0] if len(planes) == 1 else '(both planes)'}" for role, planes in roles.items())
        texts.append((name, ", ".join(places)))
    return texts


def _events(entry: PlaneEntry) -> tuple[int, int]:
    """What happened to amaxes on their way into a delayed history: skipped, clamped."""
    return entry.get("amaxes_skipped") or 0, entry.get("spikes_clamped") or 0


def _column(entry: PlaneEntry) -> Column:
    return entry["role"], entry["plane"]


def _modules(statistics: Sequence[PlaneEntry]) -> list[str]:
    return list(dict.fromkeys(entry["module"] for entry in statistics))


def _rank(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _largest(values: Iterable[float | None]) -> float | None:
    """The largest value, NaN if there is one, None if there is none at all."""
    return max((value for value in values if value is not None), key=_rank, default=None)
