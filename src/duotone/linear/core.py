"""The linear core: the one forward and the one backward that order quantize, communicate and multiply.

    fprop  y  = x.row  w.row^T      (M, K) (N, K) -> (M, N)
    dgrad  dx = dy.row w.col^T      (M, N) (K, N) -> (M, K)
    wgrad  dw = dy.col x.col^T      (N, M) (K, M) -> (N, K)

Every operand is a plane with its contraction last, in the format that the plan names.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from duotone.linear.plan import LinearPlan
from duotone.tensor.saving import pack, unpack


class LinearFunction(torch.autograd.Function):
    """x (M, K), weight (N, K), bias (N,) or None, seed int64 (1,) or None -> y (M, N) in x's dtype."""

    @staticmethod
    def forward(
        ctx: Any, plan: LinearPlan, x: Tensor, weight: Tensor, bias: Tensor | None, seed: Tensor | None
    ) -> Tensor:
        layout, seeds = plan.layout, plan.streams(seed)
        x_context, w_context = plan.input_context.with_seed(seeds[0]), plan.weight_context.with_seed(seeds[1])
        x_planes = plan.input_from.planes(x, plan.input, plan.input_usage, x_context)
        w_planes = plan.weight_from.planes(weight, plan.weight, plan.weight_usage, w_context)
        assert x_planes.rowwise is not None and w_planes.rowwise is not None
        row = layout.gather_input(x_planes.rowwise, 0)
        y = plan.fprop.rule.run(row, w_planes.rowwise, x.dtype, layout.bias_in_product(bias))
        y = layout.reduce_output(y, bias)
        kept_x = plan.source.keep(x, x_planes) if plan.weight_grad else None
        kept_w = plan.source.keep(weight, w_planes) if plan.input_grad else None
        ctx.plan = plan
        ctx.kept, tensors = pack(kept_x, kept_w)
        # Not among the saved tensors: a recomputed forward must not replace the seed of the first one.
        ctx.seed = seeds[2]
        ctx.save_for_backward(*tensors)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dy = gradients[0]
        plan: LinearPlan = ctx.plan
        layout, source = plan.layout, plan.source
        kept_x, kept_w = unpack(ctx.kept, ctx.saved_tensors)
        dy_planes = plan.grad_output.encode(dy, plan.grad_usage, plan.grad_context.with_seed(ctx.seed))
        dx = dw = db = None
        if kept_w is not None and dy_planes.rowwise is not None:
            row = layout.gather_grad(dy_planes.rowwise, 0)
            dx = plan.dgrad.rule.run(row, source.restore(kept_w, dy.dtype), dy.dtype)
            dx = layout.reduce_grad_input(dx)
        if kept_x is not None and dy_planes.columnwise is not None:
            col = layout.gather_grad(dy_planes.columnwise, 1)
            operand = source.restore(layout.gather_input(kept_x, source.token_dim), dy.dtype)
            dw = plan.wgrad.rule.run(col, operand, dy.dtype)
        if ctx.needs_input_grad[3]:
            db = layout.reduce_grad_bias(dy.sum(0))
        return None, dx, dw, db, None


def linear(plan: LinearPlan, x: Tensor, weight: Tensor, bias: Tensor | None, seed: Tensor | None) -> Tensor:
    """x (*lead, K) -> (*lead, N), as the plan says. `seed` is needed where the plan rounds stochastically."""
    if x.dim() == 2:
        return LinearFunction.apply(plan, x, weight, bias, seed)  # type: ignore[no-any-return]
    flat = x.reshape(-1, x.shape[-1]) if x.numel() else x.reshape(x.numel() // max(1, x.shape[-1]), x.shape[-1])
    y: Tensor = LinearFunction.apply(plan, flat, weight, bias, seed)  # type: ignore[assignment]
    if y.shape[0] == flat.shape[0]:
        return y.view(*x.shape[:-1], weight.shape[0])
    return y.view(-1, *x.shape[1:-1], weight.shape[0])  # sequence parallelism gathers or scatters the first dimension
