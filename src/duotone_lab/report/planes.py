"""Statistics of quantized planes as tables: role and plane across, layers of one kind in a row that unfolds."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from duotone.recipes.roles import PLANES_OF_GEMM
from duotone_lab.report.axis import round_out
from duotone_lab.report.metrics import METRICS, Cell, Metric
from duotone_lab.report.module_names import pattern
from duotone_lab.report.numbers import finite, share, significant
from duotone_lab.training.schema import PlaneEntry, ProductEntry, RunEntry

Column = tuple[str, str]
"""A role and a plane."""

COLUMNS: tuple[Column, ...] = tuple(
    (role, plane) for role in ("input", "weight", "grad_output") for plane in ("rowwise", "columnwise")
)


@dataclass(frozen=True)
class Row:
    """A module, or all of one kind: for each column the cells of the metrics and a text for hovering."""

    name: str
    cells: list[tuple[list[Cell], str]]
    members: "list[Row]"


def is_exact(run: RunEntry) -> bool:
    """True for a run with statistics whose planes all hold their tensor unchanged."""
    return bool(run["statistics"]) and all(entry["snr_db"] is None for entry in run["statistics"])


def signal_limits(runs: Iterable[RunEntry]) -> tuple[float, float]:
    """The ends of the colour scale of signal-to-noise, which all runs share."""
    values = [value for run in runs for entry in run["statistics"] if finite(value := entry["snr_db"])]
    return round_out(min(values, default=0.0), max(values, default=1.0))


def rows(statistics: Sequence[PlaneEntry], limits: tuple[float, float], *, members: int, hover: bool) -> list[Row]:
    """One row for each kind of module, with the worst value of its layers; `members` metrics of each layer below."""
    across, kinds = columns(statistics), defaultdict(list)
    for entry in statistics:
        kinds[pattern(entry["module"])].append(entry)
    result = []
    for kind, entries in kinds.items():
        modules = defaultdict(list)
        for entry in entries:
            modules[entry["module"]].append(entry)
        several = len(modules) > 1
        below = modules.items() if several and members else ()
        shown = METRICS[:members]
        layers = [Row(name, _cells(part, across, limits, shown, hover), []) for name, part in below]
        name = f"{kind} ({len(modules)})" if several else entries[0]["module"]
        result.append(Row(name, _cells(entries, across, limits, METRICS, hover), layers))
    return result


def overview(run: RunEntry, across: Sequence[Column], limits: tuple[float, float]) -> Row:
    """The worst values of all modules of a run."""
    return Row(run["name"], _cells(run["statistics"], across, limits, METRICS, True), [])


def _cells(
    entries: Sequence[PlaneEntry],
    across: Sequence[Column],
    limits: tuple[float, float],
    metrics: Sequence[Metric],
    hover: bool,
) -> list[tuple[list[Cell], str]]:
    by_column: dict[Column, list[PlaneEntry]] = defaultdict(list)
    for entry in entries:
        by_column[_column(entry)].append(entry)
    parts = [by_column[column] for column in across]
    return [
        ([metric.draw(metric.worst(part), limits) for metric in metrics], _title(part) if hover else "")
        if part
        else ([Cell("")], "")
        for part in parts
    ]


def _title(entries: Sequence[PlaneEntry]) -> str:
    """Formats, shares and extremes; of several modules the one with the lowest signal-to-noise by name."""
    formats_used = ", ".join(sorted({entry["format"] for entry in entries}))
    worst = min(entries, key=lambda entry: math.inf if entry["snr_db"] is None else entry["snr_db"])
    shares = f"underflow {share(worst['underflow'])} %, saturation {share(worst['saturation'])} %"
    where = f"lowest in {worst['module']}: " if len(entries) > 1 else ""
    return f"{formats_used}, {where}{shares}, amax {significant(worst['amax'])}, samples {worst['samples']}"


def events(statistics: Sequence[PlaneEntry]) -> str:
    """The number of amaxes that entered a delayed history changed or not at all, and the worst module; "" for none."""
    skipped, clamped = (sum(counts) for counts in zip((0, 0), *map(_events, statistics), strict=True))
    if not skipped and not clamped:
        return ""
    worst = max(statistics, key=lambda entry: sum(_events(entry)))
    parts = [f"{skipped} amaxes were not finite"] if skipped else []
    parts += [f"{clamped} were spikes and entered as less"] if clamped else []
    return f"delayed scaling: {', '.join(parts)}; most of them in {worst['module']} ({' '.join(_column(worst))})"


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


def products(run: RunEntry) -> list[tuple[str, list[tuple[str, str]]]]:
    """For each kind of module the largest error of each GEMM in percent, and its ratio to independent errors."""
    kinds: dict[str, dict[str, list[ProductEntry]]] = defaultdict(lambda: defaultdict(list))
    for entry in run.get("products", ()):
        kinds[pattern(entry["module"])][entry["gemm"]].append(entry)
    rows = []
    for kind, by_gemm in kinds.items():
        worst = [max(by_gemm[gemm], key=lambda entry: entry["error"], default=None) for gemm in PLANES_OF_GEMM]
        texts = [("", "") if one is None else _product(one) for one in worst]
        rows.append((kind, texts))
    return rows


def _product(entry: ProductEntry) -> tuple[str, str]:
    return significant(100 * entry["error"]), significant(entry["error"] / entry["expected"], 2)
