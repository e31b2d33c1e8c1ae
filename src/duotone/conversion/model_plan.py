"""The plan of a model: every GEMM of every planned module, and the reason for each module in high precision.

A `Plan` is a value: its rows print as a table, filter, compare with another plan, and go to JSON.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from typing import overload

import torch
from torch import nn

from duotone.attention import DotProductAttention, MultiheadAttention
from duotone.conversion.attention_cores import idle_cores, left_in_high_precision
from duotone.conversion.default_rules import Reason, Why
from duotone.conversion.forwards import is_fast_path_closed
from duotone.conversion.fusing import fused_row
from duotone.conversion.naming import named_modules, require_model, sites_of
from duotone.conversion.skipped import skipped_modules
from duotone.conversion.targets import trains
from duotone.conversion.warnings import unmatched_rules
from duotone.dispatch.target import require_here
from duotone.errors import UserError
from duotone.modules.base import Call
from duotone.modules.parametrizations import reads_without_effect
from duotone.modules.planned import Planned
from duotone.recipes.recipe import Recipe, RecipeLike, as_recipe
from duotone.text import aligned

COLUMNS = ("module", "gemm", "a", "b", "kernel", "runs", "reason")
RUNS = ("native", "emulated", "high precision")


@dataclass(frozen=True)
class PlanRow:
    """One GEMM of one module, or one module that stays as it is (`gemm` is "-").

    `a` and `b` are the formats of the operands. `native` kernels multiply the codes themselves, others decode first.
    """

    module: str
    gemm: str
    a: str
    b: str
    kernel: str
    native: bool
    reason: str

    @property
    def runs(self) -> str:
        """ "native", "emulated", or "high precision" where an operand is not quantized."""
        if "identity" in (self.a, self.b):
            return "high precision"
        return "native" if self.native else "emulated"

    @property
    def cells(self) -> tuple[str, ...]:
        """The texts of `COLUMNS`."""
        return self.module, self.gemm, self.a, self.b, self.kernel, self.runs, self.reason

    def to_dict(self) -> dict[str, object]:
        """The fields by name, for JSON."""
        return asdict(self)


@dataclass(frozen=True, repr=False)
class Plan(Sequence[PlanRow]):
    """The rows of a model in the order of its modules. `str(plan)` is a table."""

    rows: tuple[PlanRow, ...]

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> PlanRow: ...

    @overload
    def __getitem__(self, index: slice) -> "Plan": ...

    def __getitem__(self, index: int | slice) -> "PlanRow | Plan":
        return Plan(self.rows[index]) if isinstance(index, slice) else self.rows[index]

    def __str__(self) -> str:
        return "\n".join(aligned([COLUMNS, *(row.cells for row in self.rows)], [False] * len(COLUMNS)))

    def __repr__(self) -> str:
        counts = Counter(row.runs for row in self.rows)
        return f"Plan({len(self)} rows: {', '.join(f'{counts[runs]} {runs}' for runs in RUNS)})"

    def filter(
        self,
        module: str = "*",
        *,
        gemm: str | None = None,
        runs: str | None = None,
        reason: str | None = None,
    ) -> "Plan":
        """The rows that meet every condition; None is no condition.

        `module` is a pattern for the whole name ("layers.0.*"), `gemm` a name ("fprop"), `runs` is "native",
        "emulated" or "high precision", `reason` a part of the reason. UserError if `runs` is unknown.
        """
        if runs is not None and runs not in RUNS:
            raise UserError(f"runs {runs!r} is unknown; allowed are {', '.join(map(repr, RUNS))}")
        return Plan(
            tuple(
                row
                for row in self.rows
                if fnmatchcase(row.module, module)
                and gemm in (None, row.gemm)
                and runs in (None, row.runs)
                and (reason is None or reason in row.reason)
            )
        )

    def diff(self, other: "Plan") -> "PlanDiff":
        """The difference to `other`: the rows of both plans that differ, by module and GEMM."""
        if not isinstance(other, Plan):
            raise UserError(f"diff takes a Plan; got {type(other).__name__}: give what duotone.plan returned")
        before, after = dict(_numbered(self.rows)), dict(_numbered(other.rows))
        pairs = ((before.get(key), after.get(key)) for key in before | after)
        return PlanDiff(tuple((old, new) for old, new in pairs if old != new))

    def to_json(self) -> str:
        """A list of one object per row, which `from_json` reads back."""
        return json.dumps([row.to_dict() for row in self.rows], indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan that `to_json` wrote. UserError if the text is of another kind."""
        try:
            table = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"a plan is a JSON list of rows; this is no JSON: {error}") from None
        if not isinstance(table, list):
            raise UserError(f"a plan is a JSON list of rows; got {type(table).__name__}")
        types = {field.name: bool if field.name == "native" else str for field in fields(PlanRow)}
        for row in table:
            if not isinstance(row, dict) or {key: type(value) for key, value in row.items()} != types:
                raise UserError(f"a row of a plan has {', '.join(types)}; got {str(row)[:60]}")
        return cls(tuple(PlanRow(**row) for row in table))


@dataclass(frozen=True, repr=False)
class PlanDiff:
    """Pairs of rows (before, after) that differ; None if one plan has no such row. `str(diff)` is a table."""

    pairs: tuple[tuple[PlanRow | None, PlanRow | None], ...]

    def __iter__(self) -> Iterator[tuple[PlanRow | None, PlanRow | None]]:
        return iter(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def __str__(self) -> str:
        signed = [(sign, row) for pair in self.pairs for sign, row in zip("-+", pair, strict=True) if row is not None]
        rows = [("", *COLUMNS), *((sign, *row.cells) for sign, row in signed)]
        return "\n".join(aligned(rows, [False] * len(rows[0]))) if signed else "the plans are the same"

    def __repr__(self) -> str:
        return f"PlanDiff({len(self)} rows differ)"


def _numbered(rows: Sequence[PlanRow]) -> Iterator[tuple[tuple[str, str, int], PlanRow]]:
    """Rows by module, GEMM and how many of these came before."""
    counts = Counter[tuple[str, str]]()
    for row in rows:
        place = row.module, row.gemm
        yield (*place, counts[place]), row
        counts[place] += 1


def _for_model(model: nn.Module, recipe: RecipeLike | None) -> Recipe | None:
    """The recipe. UserError if nothing in the model would follow it."""
    if recipe is None:
        return None
    recipe = as_recipe("plan", recipe)
    if not any(isinstance(module, Planned | DotProductAttention) for module in model.modules()):
        kind = type(model).__name__
        remedy = "call duotone.convert(model, recipe) before, or leave the recipe out"
        raise UserError(f"nothing in {kind} follows recipes: {remedy}")
    return recipe


def plan(
    model: nn.Module,
    recipe: RecipeLike | None = None,
    *,
    device: str | None = None,
    dtype: torch.dtype | None = None,
) -> Plan:
    """The kernel of each GEMM of each linear of a converted model, and the modules in high precision with the reasons.

    `recipe` stands for an enclosing autocast, `dtype` for that of torch.autocast. `device` may name a GPU that is not
    here, as "sm90" or "H100". If `device` or `dtype` is None, it is that of the weights. UserError if `device` is a
    CUDA device that is not here.
    """
    require_model("plan", model)
    require_here(str(device))
    if not isinstance(dtype, torch.dtype | None):
        raise UserError(f"dtype is {dtype!r}; give torch.bfloat16, torch.float16 or torch.float32")
    recipe = _for_model(model, recipe)
    rows: list[PlanRow] = []
    skipped, trained, idle = skipped_modules(model), trains(model), idle_cores(model)
    planned = [module for module in model.modules() if isinstance(module, Planned)]
    with reads_without_effect(model):
        for name, module in named_modules(model):
            if isinstance(module, MultiheadAttention):
                # Its linears get their consumers first, so each slot is asked once.
                module.prepare_recipe(recipe or module.recipe)
            if isinstance(module, Planned):
                full_name = module.module_name if name and module.site.named else name
                rows.extend(_rows(full_name, module, recipe or module.recipe, device, dtype, trained))
            elif isinstance(module, DotProductAttention) and name not in idle:
                place = device or (str(planned[0].weight.device) if planned else None)
                products = module.plan_rows(recipe or module.recipe, place)
                rows.extend(PlanRow(name, **product._asdict()) for product in products)
            else:
                why = skipped.get(name) or _why(module)
                rows.extend([_row(name, why.text)] if why else [])
            if planned and (text := left_in_high_precision(name, module, recipe or planned[0].recipe)):
                rows.append(_row(name, text))
            rows.extend([_row(name, text)] if (text := fused_row(module, recipe)) else [])
        if planned:
            sites = sites_of(model)
            places = [(module.module_type, module.module_name, module.site) for module in planned]
            places += [("linear", name, sites[name]) for name in skipped]
            for rule in unmatched_rules(recipe or planned[0].recipe, planned[0].rules, places):
                rows.append(_row("a rule", f"matches no tensor of the model: {rule.to_dict()}"))
    return Plan(tuple(rows))


def _rows(
    name: str, module: Planned, recipe: Recipe, device: str | None, dtype: torch.dtype | None, trained: bool
) -> Iterator[PlanRow]:
    weight = module.weight
    runs = module.plans.plan(
        recipe, Call(device or str(weight.device), dtype or weight.dtype, (trained, trained and weight.requires_grad))
    )
    for gemm in runs.gemms:
        kernel, reason = module.kernel_of(runs, gemm)
        yield PlanRow(name, gemm.gemm, gemm.a.name, gemm.b.name, kernel, gemm.rule.native, reason)
    if module.plain_gather:
        yield _row(name, f"FSDP2 gathers its weight in high precision: {module.plain_gather}")


def _row(name: str, reason: str) -> PlanRow:
    return PlanRow(name, "-", "identity", "identity", "torch", True, reason)


def _why(module: nn.Module) -> Why | None:
    """The reason in the row of a module that convert does not concern. None if it has no row."""
    if isinstance(module, nn.Linear):
        return Why(Reason.NOT_CONVERTED)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return Why(Reason.LOOK_UP)
    if is_fast_path_closed(module):
        return Why(Reason.FAST_PATH)
    declared = getattr(module, "stays_in_high_precision", None)
    return None if declared is None else Why(Reason.DECLARED, declared)
