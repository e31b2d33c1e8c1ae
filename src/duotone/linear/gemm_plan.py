"""One GEMM of a plan: which rule multiplies its operands, or why nothing may."""

from dataclasses import dataclass

import torch

from duotone.dispatch.gemms import choose
from duotone.dispatch.rule import GemmProblem, GemmRule
from duotone.dispatch.target import target
from duotone.errors import RecipeError
from duotone.formats import IDENTITY, Format
from duotone.linear.plan_request import PlanRequest
from duotone.recipes.roles import PLANES_OF_GEMM
from duotone.recipes.rules import first_rule

HIGH_PRECISION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class GemmPlan:
    """One GEMM: what is multiplied where, the rule that runs it, and what the rule has to say."""

    gemm: str
    problem: GemmProblem
    rule: GemmRule
    reason: str

    @property
    def a(self) -> Format:
        """The format of the first operand."""
        return self.problem.a

    @property
    def b(self) -> Format:
        return self.problem.b


def gemm_plan(request: PlanRequest, gemm: str, a: Format | None, b: Format | None, owed: bool) -> GemmPlan:
    """The plan of one GEMM. RecipeError if it is owed and cannot run as the recipe says."""
    refusal = _refusal(request, gemm, a, b)
    if refusal and owed:
        raise RecipeError(refusal)
    a, b = a or IDENTITY, b or IDENTITY
    fast = getattr(request.recipe, f"{gemm}_fast_accum")
    problem = GemmProblem(a, b, target(request.device), request.dtype, fast)
    rule, reason = choose(problem)
    if refusal:
        return GemmPlan(gemm, problem, rule, f"not owed here, where it would be an error: {refusal}")
    if a == b == IDENTITY:
        reason = _why_high(request, gemm)
    elif IDENTITY not in (a, b) and a.family != b.family:
        reason = f"{reason}; mixed formats, which no hardware multiplies"
    return GemmPlan(gemm, problem, rule, reason)


def _refusal(request: PlanRequest, gemm: str, a: Format | None, b: Format | None) -> str:
    """Why a GEMM cannot run as the recipe says, or ""."""
    name = request.title
    slots = " with ".join(f"{tensor_type} {direction}" for tensor_type, direction in PLANES_OF_GEMM[gemm])
    if a is None or b is None:
        return f"the recipe gives {gemm} of {name} ({slots}) only one operand; give the other a format"
    full = (a == IDENTITY, b == IDENTITY)
    if request.recipe.strict and any(full) and not all(full):
        return (
            f"strict: {gemm} of {name} pairs {a.name} with {b.name}, so it would run in high precision; "
            "give both operands a format, or set strict to false"
        )
    if not any(full) and a.family != b.family and not request.recipe.emulate_mixed:
        return (
            f"{gemm} of {name} would multiply {slots}: {a.name} ({a.family}) with {b.name} ({b.family}), which no "
            "hardware does; give both the same kind of format, or set emulate_mixed to true"
        )
    if not all(full) and request.dtype not in HIGH_PRECISION_DTYPES:
        return f"{name} is in {request.dtype}; formats encode bf16, fp16 and fp32: cast the model first"
    return ""


def _why_high(request: PlanRequest, gemm: str) -> str:
    """Why both operands of a GEMM are in high precision."""
    rules = [first_rule(request.rules, request.role(kind), request.site) for kind, _ in PLANES_OF_GEMM[gemm]]
    return rules[-1].why if rules[-1] and all(rules) else "the recipe keeps both operands in high precision"
