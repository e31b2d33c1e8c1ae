"""The plan of a run beside what ran: counts of GEMMs by kind, and one entry for all modules with the same rows."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from duotone.recipes.roles import PLANES_OF_GEMM
from duotone_lab.report.module_names import compact
from duotone_lab.training.schema import GemmEntry, PlaneEntry

# What a plan calls an operand that is not quantized.
HIGH_PRECISION = frozenset({None, "identity", "bf16", "bfloat16", "fp16", "float16", "fp32", "float32"})
KINDS = ("native", "emulated", "high precision")


@dataclass(frozen=True)
class PlanGroup:
    """Modules that share all their rows; `rows` are those of one of them, each with its kind."""

    modules: list[str]
    count: int
    rows: list[tuple[GemmEntry, str]]


def observed(plan: Sequence[GemmEntry], statistics: Sequence[PlaneEntry]) -> list[GemmEntry]:
    """The plan. The field `ran` of each row tells whether the sampled steps used the planned formats."""
    planes = {(entry["module"], entry["role"], entry["plane"]): entry for entry in statistics}
    rows: list[GemmEntry] = []
    for row in plan:
        sides = [planes.get((row["module"], *side)) for side in PLANES_OF_GEMM.get(row["gemm"] or "", ())]
        present = [side for side in sides if side is not None]
        if len(present) < 2:
            ran = "not observed"
        elif [side["format"] for side in present] == [row["a"], row["b"]]:
            ran = f"as asked, {min(side['samples'] or 0 for side in present)} times"
        else:
            ran = f"NOT as asked: {' x '.join(side['format'] for side in present)}"
        rows.append({**row, "ran": ran})
    return rows


def kind(row: GemmEntry) -> str:
    """`high precision` if neither operand is quantized. Otherwise `native` or `emulated`."""
    if row["a"] in HIGH_PRECISION and row["b"] in HIGH_PRECISION:
        return "high precision"
    return "native" if row["native"] else "emulated"


def counts(plan: Sequence[GemmEntry]) -> dict[str, int]:
    """The number of GEMMs of each kind, zeros included."""
    return {**dict.fromkeys(KINDS, 0), **Counter(map(kind, plan))}


def groups(plan: Sequence[GemmEntry]) -> list[PlanGroup]:
    """The plan by module, modules with equal rows together, in the order of their first module."""
    by_module: dict[str, list[GemmEntry]] = defaultdict(list)
    for row in plan:
        by_module[row["module"]].append(row)
    alike: dict[tuple[tuple[str, ...], ...], list[str]] = defaultdict(list)
    for module, rows in by_module.items():
        alike[tuple(tuple(str(cell) for name, cell in row.items() if name != "module") for row in rows)].append(module)
    return [
        PlanGroup(compact(modules), len(modules), [(row, kind(row)) for row in by_module[modules[0]]])
        for modules in alike.values()
    ]
