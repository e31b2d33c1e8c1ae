"""The linear core: the one forward and the one backward that order quantize and multiply.

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
from duotone.tensor.plane import Plane


class LinearFunction(torch.autograd.Function):
    """x (M, K), weight (N, K), bias (N,) or None, seed int64 (1,) or None -> y (M, N) in x's dtype."""

    @staticmethod
    def forward(
        ctx: Any, plan: LinearPlan, x: Tensor, weight: Tensor, bias: Tensor | None, seed: Tensor | None
    ) -> Tensor:
        x_planes = plan.input.encode(x, plan.input_usage, _stream(seed, 0))
        w_planes = plan.weight.encode(weight, plan.weight_usage, _stream(seed, 1))
        assert x_planes.rowwise is not None and w_planes.rowwise is not None
        y = plan.fprop.rule.run(x_planes.rowwise, w_planes.rowwise, x.dtype, bias)
        kept_x = plan.source.keep(x, x_planes) if plan.weight_grad else None
        kept_w = plan.source.keep(weight, w_planes) if plan.input_grad else None
        ctx.plan = plan
        ctx.kept, tensors = _pack(kept_x, kept_w)
        ctx.save_for_backward(*tensors, seed)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dy = gradients[0]
        plan: LinearPlan = ctx.plan
        *tensors, seed = ctx.saved_tensors
        kept_x, kept_w = _unpack(ctx.kept, tensors)
        dy_planes = plan.grad_output.encode(dy, plan.grad_usage, _stream(seed, 2))
        dx = dw = db = None
        if kept_w is not None and dy_planes.rowwise is not None:
            operand = plan.source.restore(kept_w, dy.dtype)
            dx = plan.dgrad.rule.run(dy_planes.rowwise, operand, dy.dtype)
        if kept_x is not None and dy_planes.columnwise is not None:
            operand = plan.source.restore(kept_x, dy.dtype)
            dw = plan.wgrad.rule.run(dy_planes.columnwise, operand, dy.dtype)
        if ctx.needs_input_grad[3]:
            db = dy.sum(0)
        return None, dx, dw, db, None


def linear(plan: LinearPlan, x: Tensor, weight: Tensor, bias: Tensor | None, seed: Tensor | None) -> Tensor:
    """x (*lead, K) -> (*lead, N), as the plan says. `seed` is needed where the plan rounds stochastically."""
    if x.dim() == 2:
        return LinearFunction.apply(plan, x, weight, bias, seed)  # type: ignore[no-any-return]
    flat = LinearFunction.apply(plan, x.reshape(-1, x.shape[-1]), weight, bias, seed)
    return flat.view(*x.shape[:-1], weight.shape[0])  # type: ignore[union-attr]


def _stream(seed: Tensor | None, index: int) -> Tensor | None:
    """The seed of the index-th quantize of this call."""
    return None if seed is None else seed + index


def _pack(*planes: Plane | None) -> tuple[list[Any], list[Tensor]]:
    """Planes as what describes them and a flat list of tensors, for autograd to keep."""
    kinds: list[Any] = []
    tensors: list[Tensor] = []
    for plane in planes:
        kinds.append(None if plane is None else (plane.format, plane.shape, tuple(plane.parts)))
        tensors.extend(() if plane is None else plane.parts.values())
    return kinds, tensors


def _unpack(kinds: list[Any], tensors: list[Tensor]) -> list[Plane | None]:
    remaining = iter(tensors)
    planes: list[Plane | None] = []
    for kind in kinds:
        if kind is None:
            planes.append(None)
            continue
        fmt, shape, names = kind
        planes.append(Plane(fmt, {name: next(remaining) for name in names}, shape))
    return planes
