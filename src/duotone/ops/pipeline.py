"""The pipeline: the one autograd function that runs a tuple of stages forward and backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from duotone.linear.stage import Stage
from duotone.tensor.saving import pack, unpack

Stages = tuple[Stage, ...]


class PipelineFunction(torch.autograd.Function):
    """x and the operands of all stages -> y, or (y, *extra outputs) where stages have such.

    `backward` are the stages of the backward pass, in the order of forward; they stand for the same basic stages.
    """

    @staticmethod
    def forward(ctx: Any, forward: Stages, backward: Stages, x: Tensor, *operands: Any) -> Any:
        kept: list[Any] = []
        counts: list[int] = []
        outputs: list[Tensor] = []
        y, at = x, 0
        for stage in forward:
            end = at + sum(stage.arity)
            y, kept_here, extra = stage.run(y, operands[at:end])
            at = end
            for one in kept_here:
                kept += one
                counts.append(len(one))
            if extra:
                outputs += extra
        ctx.stages, ctx.counts = backward, counts
        ctx.shells, tensors = pack(kept)
        ctx.save_for_backward(*tensors)
        return (y, *outputs) if outputs else y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        run = _backward_once if torch.is_grad_enabled() else _backward
        device = gradients[0].device.type
        if device == "meta" or not torch.is_autocast_enabled(device):
            return run(ctx, *gradients)
        with torch.autocast(device, enabled=False):
            return run(ctx, *gradients)


def _backward(ctx: Any, *gradients: Any) -> Any:
    stages, needs, counts = ctx.stages, ctx.needs_input_grad, ctx.counts
    kept = unpack(ctx.shells, ctx.saved_tensors)
    handed, outputs = [gradients[0]], gradients[1:]
    found: list[Tensor | None] = []
    last, kept_last, extra, at = len(counts), len(kept), len(outputs), len(needs)
    for stage in reversed(stages):
        first, start = last - len(stage.arity), at - sum(stage.arity)
        kept_here = []
        for count in reversed(counts[first:last]):
            kept_here.append(tuple(kept[kept_last - count : kept_last]))
            kept_last -= count
        kept_here.reverse()
        here = outputs[extra - stage.extra_outputs : extra] if stage.extra_outputs else ()
        # Popped, so that a stage can let go of the gradient that it was given.
        dx, gradients_here = stage.run_backward(handed.pop(), kept_here, needs[start:at], here)
        handed.append(dx)
        del dx
        found = [*gradients_here, *found]
        last, extra, at = first, extra - stage.extra_outputs, start
        if not any(needs[2:at]):
            break  # what is before saved nothing
    missing = at - FIXED
    return None, None, handed[0] if needs[2] else None, *[None] * missing, *found


_backward_once = once_differentiable(_backward)
"""For `create_graph=True`: what it gives cannot be differentiated again."""


class Runner:
    """What runs a pipeline: `apply(forward, backward, x, *operands)`. Observers put themselves in its place."""

    def __init__(self) -> None:
        self.apply: Callable[..., Any] = PipelineFunction.apply


RUNNER = Runner()
FIXED = 3
"""Arguments before the operands: two tuples of stages, and x."""
