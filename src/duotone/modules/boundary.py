"""Quantized tensors across the boundary of a module: its output, and the gradient that it hands back."""

import warnings
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from duotone.custom_gradient import with_gradient
from duotone.errors import UserError
from duotone.formats import IDENTITY
from duotone.linear.plan import LinearPlan
from duotone.modules.planned import Planned
from duotone.numbered import constant_in_traces
from duotone.pipeline.autograd import Outputs, Refused
from duotone.pipeline.op import Op, info_of, run
from duotone.pipeline.titles import title
from duotone.sharding.dtensors import is_distributed
from duotone.state import seeds
from duotone.tensor.context import QuantizeContext
from duotone.tensor.plane import Usage
from duotone.tensor.quantizer import Quantizer

BOUNDARY = 1 << 62
"""The distance from the seeds of a forward's own operands to those of its boundary slots."""


@constant_in_traces
def _warn_of_unknown(name: str, slot: str) -> None:
    """Also in the trace of a checkpoint, where Dynamo follows no warning."""
    warnings.warn(
        f"{name}: the {slot} is quantized for a consumer that is not known; set {slot}_quantizer_role", stacklevel=6
    )


def run_with_boundary(
    ops: Sequence[Op], x: Tensor, first: bool | Tensor | None, module: Planned, fp8_output: bool, fp8_grad: bool
) -> Outputs:
    """`run` of ops that end with `module`. `fp8_output` quantizes its output, `fp8_grad` the gradient of `x`.

    Under a backward override the gradient stays as it is. UserError for a DTensor.
    """
    if is_distributed(x):
        raise UserError(
            f"{title(module)}: a DTensor is not quantized at the boundary of a module; leave out fp8_output and "
            "fp8_grad, and fp8_mha of the recipe"
        )
    for quantizes, role, slot in (
        (fp8_output, module.output_quantizer_role, "output"),
        (fp8_grad, module.grad_input_quantizer_role, "grad_input"),
    ):
        if quantizes and role is None:
            _warn_of_unknown(module.module_name, slot)
    signal = info_of(x, module)
    for op in ops:  # refuses a bad input before anything happens
        stage, signal, *_ = op.link(signal, first)
    plan: LinearPlan = stage.plan  # type: ignore[attr-defined]
    fp8_grad = fp8_grad and plan.weight.backward.quantizes_gradient
    seed = None
    if (fp8_output and plan.output.is_stochastic) or (fp8_grad and plan.grad_input.is_stochastic):
        buffer = getattr(module, seeds.BUFFER)
        seed = (seeds.upcoming(buffer, plan.seeds) if plan.seeds else seeds.take(buffer, 1)) + BOUNDARY
    propagate = plan.input.context.propagate
    if fp8_grad:
        x = quantized_gradient(x, plan.grad_input, QuantizeContext(seed=seed, propagate=propagate))
    y = run(ops, x, (), first, module)
    if not fp8_output:
        return y
    y, *more = y if isinstance(y, tuple) else (y,)
    usage = Usage(True, plan.weight_grad or plan.input_grad)
    context = QuantizeContext(seed=None if seed is None else seed + 1, propagate=propagate)
    y = plan.output.quantize(y, usage=usage, ctx=context)
    return (y, *more) if more else y


def quantized_gradient(x: Tensor, quantizer: Quantizer, context: QuantizeContext) -> Tensor:
    """x, whose gradient is quantized; in a trace a plain tensor with the same values."""

    def gradients(dy: Tensor) -> tuple[Tensor]:
        if torch.compiler.is_dynamo_compiling():
            return (quantizer.quantize(dy, ctx=context).dequantize(),)
        if not torch.is_grad_enabled():
            return (quantizer.make(dy, ctx=context),)
        if quantizer.rowwise == quantizer.columnwise == IDENTITY:
            return (quantizer.quantize(dy),)
        refusal = Refused("the gradient at a boundary is quantized")
        return (with_gradient(partial(quantizer.make, ctx=context), refusal.check, dy),)

    return with_gradient(lambda x: x.view_as(x), gradients, x)
