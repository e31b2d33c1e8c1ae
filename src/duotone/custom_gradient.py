"""A function with a gradient of its own, for autograd."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

T = TypeVar("T")


class GradientContext(FunctionCtx):
    """What the forward of `WithGradient` saves for its backward."""

    gradients: Callable[..., Any]
    count: int


class WithGradient(torch.autograd.Function):
    """See `with_gradient`."""

    @staticmethod
    def forward(ctx: GradientContext, value: Callable[..., T], gradients: Callable[..., Any], *x: Tensor) -> T:
        ctx.gradients, ctx.count = gradients, len(x)
        ctx.set_materialize_grads(False)
        return value(*x)

    @staticmethod
    def backward(ctx: GradientContext, *gradients: Tensor | None) -> tuple[Any, ...]:
        is_needed = any(gradient is not None for gradient in gradients)
        return None, None, *(ctx.gradients(*gradients) if is_needed else (None,) * ctx.count)


def with_gradient(value: Callable[..., T], gradients: Callable[..., Any], *x: Tensor) -> T:
    """`value(*x)`. `gradients` computes the gradient of each x from those of the outputs, if an output has one."""
    return WithGradient.apply(value, gradients, *x)
