"""Statistics of quantized planes, arranged for heat maps and tables: role and plane across, modules down."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from duotone.report.heat_map import Cell, Column, Grid
from duotone.report.module_names import pattern
from duotone.report.numbers import finite, number, share, significant

COLUMNS: tuple[Column, ...] = tuple(
    (role, plane) for role in ("input", "weight", "grad_output") for plane in ("rowwise", "columnwise")
)
SHARES = ("underflow", "saturation")
EVENTS = {"amaxes_skipped": "amaxes were not finite", "spikes_clamped": "were spikes and entered as less"}
"""What happened to amaxes on their way into a delayed history; results of earlier versions do not say."""

Statistic = Mapping[str, Any]
Run = Mapping[str, Any]


def is_exact(run: Run) -> bool:
    """True for a run with statistics whose planes all hold their tensor unchanged."""
    statistics = run["statistics"]
    return bool(statistics) and all(entry["snr_db"] is None for entry in statistics)


def merged(statistics: Sequence[Statistic]) -> list[dict[str, Any]]:
    """One entry for all modules whose names differ in numbers alone: the worst value of each field.

    A NaN counts as the worst. `samples` is summed.
    """
    groups = defaultdict(list)
    for entry in statistics:
        groups[pattern(entry["module"]), entry["role"], entry["plane"]].append(entry)
    result = []
    for (module, role, plane), entries in groups.items():
        signals = [entry["snr_db"] for entry in entries if entry["snr_db"] is not None]
        fields = ("underflow", "saturation", "amax")
        worst = {name: _largest(entry[name] for entry in entries) for name in fields}
        low = None if not signals else -_largest(-signal for signal in signals)  # type: ignore[operator]
        formats = ", ".join(sorted({entry["format"] for entry in entries}))
        samples = sum(entry["samples"] or 0 for entry in entries)
        place = {"module": module, "role": role, "plane": plane, "format": formats}
        counts = {name: sum(entry.get(name) or 0 for entry in entries) for name in EVENTS}
        result.append({**place, **worst, "snr_db": low, "samples": samples, **counts})
    return result


def signal_grid(statistics: Sequence[Statistic]) -> Grid:
    """Signal-to-noise in dB per module and plane. An exact plane is a cell without colour."""
    cells = {}
    for entry in statistics:
        signal = entry["snr_db"]
        text = "exact" if signal is None or signal == math.inf else number(signal, 1)
        value = None if text == "exact" else signal
        lost, held = share(entry["underflow"]), share(entry["saturation"])
        largest, samples = significant(entry["amax"]), entry["samples"]
        title = f"{entry['format']}, underflow {lost} %, saturation {held} %, amax {largest}, samples {samples}"
        cells[entry["module"], _column(entry)] = Cell(value, text, title)
    return Grid(_modules(statistics), _columns(statistics), cells)


def events(statistics: Sequence[Statistic]) -> str:
    """How many amaxes did not enter their delayed history as they were, and in which module most; "" for none."""
    counts = {name: sum(entry.get(name) or 0 for entry in statistics) for name in EVENTS}
    if not any(counts.values()):
        return ""
    worst = max(statistics, key=lambda entry: sum(entry.get(name) or 0 for name in EVENTS))
    told = ", ".join(f"{counts[name]} {text}" for name, text in EVENTS.items() if counts[name])
    return f"delayed scaling: {told}; most of them in {worst['module']} ({' '.join(_column(worst))})"


def share_grid(runs: Sequence[Run], field: str) -> Grid:
    """Mean over modules of `underflow` or `saturation` in percent, per run and plane; the worst module."""
    cells = {}
    every: list[Statistic] = []
    for run in runs:
        groups = defaultdict(list)
        for entry in run["statistics"]:
            if entry[field] is not None:
                groups[_column(entry)].append(entry)
        for column, entries in groups.items():
            mean = sum(entry[field] for entry in entries) / len(entries)
            worst = max(entries, key=lambda entry: _rank(entry[field]))
            title = f"{run['name']}, {' '.join(column)}: worst {share(worst[field])} % in {worst['module']}"
            cells[run["name"], column] = Cell(100.0 * mean, share(mean), title)
        every.extend(run["statistics"])
    return Grid([run["name"] for run in runs], _columns(every), cells)


def share_rows(statistics: Sequence[Statistic]) -> list[tuple[str, list[tuple[str, int]]]]:
    """Per module: underflow and saturation of each column, as text in percent and a shade, 0 to 4."""
    entries = {(entry["module"], _column(entry)): entry for entry in statistics}
    rows = []
    for module in _modules(statistics):
        found = [entries.get((module, column)) for column in _columns(statistics)]
        values = [None if entry is None else entry[field] for entry in found for field in SHARES]
        rows.append((module, [(share(value), _level(value)) for value in values]))
    return rows


def share_columns(statistics: Sequence[Statistic]) -> list[Column]:
    """The columns that `share_rows` has, each twice: underflow and saturation."""
    return list(_columns(statistics))


def formats(statistics: Sequence[Statistic]) -> list[tuple[str, str]]:
    """Each format and the planes that it was used for: `input rowwise, weight (both planes)`."""
    used: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for role, plane in _columns(statistics):
        for name in sorted({entry["format"] for entry in statistics if _column(entry) == (role, plane)}):
            used[name][role].append(plane)
    if len(used) == 1:
        return [(name, "in all planes") for name in used]
    texts = []
    for name, roles in used.items():
        places = (f"{role} {planes[0] if len(planes) == 1 else '(both planes)'}" for role, planes in roles.items())
        texts.append((name, ", ".join(places)))
    return texts


def _column(entry: Statistic) -> Column:
    return entry["role"], entry["plane"]


def _columns(statistics: Sequence[Statistic]) -> list[Column]:
    """The usual columns, then any other that occurs."""
    others = {_column(entry) for entry in statistics} - set(COLUMNS)
    return [*COLUMNS, *sorted(others)]


def _modules(statistics: Sequence[Statistic]) -> list[str]:
    return list(dict.fromkeys(entry["module"] for entry in statistics))


def _rank(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _largest(values: Iterable[float | None]) -> float | None:
    """The largest value, NaN if there is one, None if there is none at all."""
    return max((value for value in values if value is not None), key=_rank, default=None)


def _level(value: float | None) -> int:
    """How strongly a share is shaded: above 0.1 %, 1 %, 5 %, 20 %."""
    if not finite(value):
        return 0
    return sum(value > limit for limit in (0.001, 0.01, 0.05, 0.2))
