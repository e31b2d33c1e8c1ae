"""Quantized tensors across the boundary of a module: its output, and the gradient that it hands back."""

import warnings
from typing import Any

from torch import Tensor
from torch.autograd import Function

from duotone.linear.plan import LinearPlan
from duotone.ops.planned import Planned
from duotone.tensor.plane import Usage


def quantize_output(y: Tensor, plan: LinearPlan) -> Tensor:
    """The output in the formats of its consumer; columnwise only where a backward will read it."""
    return plan.output.quantize(y, usage=Usage(True, plan.weight_grad or plan.input_grad))


def quantize_gradient(x: Tensor, plan: LinearPlan) -> Tensor:
    """`x`, whose gradient comes quantized; under a backward override it stays as it is."""
    return QuantizedGradient.apply(x, plan) if plan.source.quantizes_gradient else x  # type: ignore[no-any-return]


class QuantizedGradient(Function):
    """Identity in forward; backward quantizes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: LinearPlan) -> Tensor:
        ctx.plan = plan
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.plan.grad_input.make(gradients[0]), None


def warn_without_role(module: Planned, output: bool, gradient: bool) -> None:
    """Say once per module that a boundary slot was asked for without a consumer's role."""
    for asked, role, slot in (
        (output, module.output_quantizer_role, "output"),
        (gradient, module.grad_input_quantizer_role, "grad_input"),
    ):
        if asked and role is None:
            message = f"{module.module_name}: the {slot} is quantized for a consumer that is not known; set "
            warnings.warn(f"{message}{slot}_quantizer_role", stacklevel=4)
