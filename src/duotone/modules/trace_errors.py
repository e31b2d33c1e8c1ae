"""Errors in traces: what a trace refuses, and what it leaves to eager code."""

from typing import NoReturn

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
def refuse_amaxes() -> NoReturn:
    """UserError in a trace that would record no amax of a weight of `gather_quantized`."""
    raise UserError(
        "compiled code records amaxes of weights that gather_quantized sends only for a linear whose rowwise scale is "
        "delayed; leave this layer eager, use a recipe with current scales, or duotone.convert_parameters"
    )


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
