"""Errors in traces: what a trace refuses, and what it leaves to eager code."""

from duotone.errors import UserError
from duotone.modules.base import Call, Plans
from duotone.numbered import constant_in_traces
from duotone.recipes.recipe import Recipe
from duotone.state.region import AmaxMode


def leave_to_eager(planner: Plans, recipe: Recipe, call: Call, mode: AmaxMode, error: UserError) -> None:
    """Break the graph at a call that fails in eager code too, which then has its error of one line.

    Dynamo wraps every other exception of a constant function, in many lines, and the user cannot catch its class.
    """
    from torch._dynamo.exc import Unsupported  # here it is loaded

    try:
        planner.plan(recipe, call, mode)
    except UserError:
        raise Unsupported(f"{type(error).__name__}: {error}") from error


@constant_in_traces
def refuse_export(why: str) -> None:
    """UserError in a trace of torch.export, also with strict=True."""
    raise UserError(why)


@constant_in_traces
def refuse_recompute() -> None:
    """UserError in a trace that recomputes a forward whose rowwise plane FSDP2 has not gathered."""
    raise UserError(
        "a checkpoint recomputes what was compiled outside of it, and FSDP2 has not gathered the plane that forward "
        "reads; call torch._dynamo.reset() before the first step that recomputes, or give fully_shard "
        "reshard_after_forward=False"
    )
