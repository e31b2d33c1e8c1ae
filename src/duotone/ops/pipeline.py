"""The pipeline: the one autograd function that runs a tuple of stages forward and backward."""

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
        kept: list[tuple[Any, ...]] = []
        outputs: list[Tensor] = []
        y, at = x, 0
        for stage in forward:
            groups, at = _grouped(operands, stage.arity, at)
            y, kept_here, extra = stage.run(y, groups)
            kept += kept_here
            outputs += extra
        ctx.stages, ctx.counts = backward, [len(one) for one in kept]
        ctx.shells, tensors = pack([one for kept_here in kept for one in kept_here])
        ctx.save_for_backward(*tensors)
        return (y, *outputs) if outputs else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        kept, _ = _grouped(unpack(ctx.shells, ctx.saved_tensors), ctx.counts, 0)
        stages: Stages = ctx.stages
        arities = [arity for stage in stages for arity in stage.arity]
        needs, _ = _grouped(ctx.needs_input_grad[3:], arities, 0)
        dx, outputs = gradients[0], gradients[1:]
        grads: list[tuple[Tensor | None, ...]] = []
        last, extra = len(kept), len(outputs)
        for stage in reversed(stages):
            first = last - len(stage.arity)
            own = outputs[extra - stage.extra_outputs : extra]
            asked = [(True, *needs[i]) for i in range(first, last)]
            dx, found = stage.run_backward(dx, kept[first:last], asked, own)
            grads = found + grads
            last, extra = first, extra - stage.extra_outputs
            if not (ctx.needs_input_grad[2] or any(map(any, needs[:last]))):
                break  # what is before saved nothing
        flat = [gradient for found in grads for gradient in found]
        missing = sum(arities[:last])
        return None, None, dx if last == 0 else None, *[None] * missing, *flat


def _grouped(flat: Any, counts: Any, at: int) -> tuple[list[tuple[Any, ...]], int]:
    """Consecutive tuples of these lengths out of `flat` from `at` on, and where the next one starts."""
    groups = []
    for count in counts:
        groups.append(tuple(flat[at : at + count]))
        at += count
    return groups, at
