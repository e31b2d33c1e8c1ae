"""A sampled step: every linear of a model gives its operands to a sampler, whatever recipes the step runs under."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from duotone.errors import UserError
from duotone.observe.sampling import Sampler
from duotone.observe.tapped_recipe import with_statistics
from duotone.planned.planned import Planned
from duotone.recipes.recipe import Recipe


@contextmanager
def sampled_step(model: nn.Module, sampler: Sampler) -> Iterator[None]:
    """Run the block, which computes the same bits, with a tap on every operand that linears of `model` encode.

    Backward belongs into the block. Compiled code that holds such a linear runs eager in it: a graph cannot call a
    sampler, and its guards see `tapped`. Nothing is compiled anew. Operands of attention products (`fp8_dpa`) are not
    sampled, and CUDA graphs that replay give nothing.
    """
    recipes: dict[str, Recipe] = {}

    def tapped(recipe: Recipe) -> Recipe:
        if recipe.key not in recipes:
            recipes[recipe.key] = with_statistics(recipe, sampler)
        return recipes[recipe.key]

    planners = [module.plans for module in model.modules() if isinstance(module, Planned)]
    if any(planner.tapped is not None for planner in planners):
        raise UserError("this step of the model is sampled already; close the other monitor first")
    eager = torch.compiler.set_stance("eager_on_recompile") if "torch._dynamo" in sys.modules else nullcontext()
    with eager:
        try:
            for planner in planners:
                planner.tapped = tapped
            yield
        finally:
            for planner in planners:
                planner.tapped = None
