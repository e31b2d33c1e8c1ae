"""The table of what runs: every GEMM of every module that follows plans, and what stays in high precision and why."""

from collections.abc import Iterator

import torch
from torch import nn

from duotone.attention import DotProductAttention, MultiheadAttention
from duotone.conversion import fast_path
from duotone.conversion.fusing import fused_row
from duotone.conversion.left_alone import left_alone
from duotone.conversion.naming import require_model, sites_of
from duotone.conversion.notices import unmatched_rules
from duotone.conversion.plan_table import Plan, PlanRow
from duotone.conversion.reasons import Reason, Why
from duotone.conversion.targets import trains
from duotone.errors import UserError
from duotone.planned.planned import Planned
from duotone.recipes.recipe import Recipe, RecipeLike, as_recipe
from duotone.state.traced_stages import Call


def plan(
    model: nn.Module,
    recipe: RecipeLike | None = None,
    *,
    device: str | None = None,
    dtype: torch.dtype | None = None,
) -> Plan:
    """What runs for each GEMM of each linear of a converted model, and what stays in high precision and why.

    `recipe` stands for an enclosing autocast; device and dtype are the weights' where None. `device` may also name an
    architecture that need not be here, as "sm90".
    """
    require_model("plan", model)
    if recipe is not None:
        recipe = as_recipe("plan", recipe)
        _require_converted(model)
    rows: list[PlanRow] = []
    left, trained = left_alone(model), trains(model)
    for name, module in model.named_modules():
        if isinstance(module, MultiheadAttention):
            module.meet(recipe or module.recipe)  # its linears learn their consumers, so each slot is asked once
        if isinstance(module, Planned):
            rows.extend(
                _rows(module.module_name if name else name, module, recipe or module.recipe, device, dtype, trained)
            )
        elif isinstance(module, DotProductAttention):
            rows.extend(_attention(name, module, recipe or module.recipe))
        else:
            why = left.get(name) or _why(module)
            rows.extend([_row(name, why.text)] if why else [])
        rows.extend([_row(name, text)] if (text := fused_row(module)) else [])
    planned = [module for module in model.modules() if isinstance(module, Planned)]
    if planned:
        sites = sites_of(model)
        places = [(module.module_type, module.module_name, module.site) for module in planned]
        places += [("linear", name, sites[name]) for name in left]
        for rule in unmatched_rules(recipe or planned[0].recipe, planned[0].rules, places):
            rows.append(_row("a rule", f"matches no tensor of the model: {rule.to_dict()}"))
    return Plan(tuple(rows))


def _require_converted(model: nn.Module) -> None:
    """UserError where no module would look at a recipe."""
    if not any(isinstance(module, Planned | DotProductAttention) for module in model.modules()):
        kind = type(model).__name__
        raise UserError(
            f"nothing in {kind} follows recipes: call duotone.convert(model, recipe) before, or leave the recipe out"
        )


def _rows(
    name: str, module: Planned, recipe: Recipe, device: str | None, dtype: torch.dtype | None, trained: bool
) -> Iterator[PlanRow]:
    weight = module.weight
    runs = module.plans.plan(
        recipe, Call(device or str(weight.device), dtype or weight.dtype, (trained, trained and weight.requires_grad))
    )
    for gemm in runs.gemms:
        yield PlanRow(
            name,
            gemm.gemm,
            gemm.a.name,
            gemm.b.name,
            module.kernel_of(runs, gemm),
            gemm.rule.native,
            gemm.reason,
        )


def _attention(name: str, module: DotProductAttention, recipe: Recipe) -> Iterator[PlanRow]:
    for row in module.plan_rows(recipe):
        yield PlanRow(name, row.gemm, row.a, row.b, "torch", True, row.reason)


def _row(name: str, reason: str) -> PlanRow:
    return PlanRow(name, "-", "identity", "identity", "torch", True, reason)


def _why(module: nn.Module) -> Why | None:
    """Why a module that convert does not concern has a row. None if it has none."""
    if isinstance(module, nn.Linear):
        return Why(Reason.NOT_CONVERTED)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return Why(Reason.LOOK_UP)
    if fast_path.is_closed(module):
        return Why(Reason.FAST_PATH)
    declared = getattr(module, "stays_in_high_precision", None)
    return None if declared is None else Why(Reason.DECLARED, declared)
