"""The plan of a run, for reading: how many GEMMs run how, and modules with the same rows told once."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from duotone.report.module_names import compact

# What a plan calls an operand that is not quantized.
HIGH_PRECISION = frozenset({None, "identity", "bf16", "bfloat16", "fp16", "float16", "fp32", "float32"})
KINDS = ("native", "emulated", "high precision")
PlanRow = Mapping[str, Any]


@dataclass(frozen=True)
class PlanGroup:
    """Modules that share all their rows; `rows` are those of one of them, each with its kind."""

    modules: list[str]
    count: int
    rows: list[tuple[PlanRow, str]]


def kind(row: PlanRow) -> str:
    """`high precision` where neither operand is quantized, else `native` or `emulated`."""
    if row["a"] in HIGH_PRECISION and row["b"] in HIGH_PRECISION:
        return "high precision"
    return "native" if row["native"] else "emulated"


def counts(plan: Sequence[PlanRow]) -> dict[str, int]:
    """The number of GEMMs of each kind, zeros included."""
    found = Counter(kind(row) for row in plan)
    return {name: found[name] for name in KINDS}


def groups(plan: Sequence[PlanRow]) -> list[PlanGroup]:
    """The plan by module, modules with equal rows together, in the order of their first module."""
    by_module: dict[str, list[PlanRow]] = defaultdict(list)
    for row in plan:
        by_module[row["module"]].append(row)
    alike: dict[tuple, list[str]] = defaultdict(list)
    for module, rows in by_module.items():
        key = tuple(tuple(str(row[name]) for name in ("gemm", "a", "b", "kernel", "native", "reason")) for row in rows)
        alike[key].append(module)
    return [
        PlanGroup(compact(modules), len(modules), [(row, kind(row)) for row in by_module[modules[0]]])
        for modules in alike.values()
    ]
