"""Results in buffers of the caller: the output of a module, and the gradient of its input."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from duotone.errors import UserError
from duotone.tensor import QuantizedTensor


def check_place(name: str, place: object, like: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """UserError unless `place` is a plain contiguous tensor for a result of this shape beside `like`, its input."""
    if not isinstance(place, Tensor) or isinstance(place, QuantizedTensor):
        raise UserError(f"{name} is a plain tensor {shape} to write to; got {type(place).__name__}")
    if tuple(place.shape) != shape or place.dtype is not dtype or place.device != like.device:
        got = f"{tuple(place.shape)} in {place.dtype} on {place.device}"
        raise UserError(f"{name} must be {shape} in {dtype} on {like.device}; got {got}")
    if not place.is_contiguous():
        raise UserError(f"{name} has strides {place.stride()}; give a contiguous tensor")
    if place.requires_grad:
        raise UserError(f"{name} requires a gradient; give a buffer without one, as out.detach()")
    if place.device.type != "meta" and _overlap(place, like):
        raise UserError(f"{name} shares memory with the input; give a buffer of its own")


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors lie in one storage, at places that meet."""
    if isinstance(b, QuantizedTensor) or not a.numel() or not b.numel():
        return False
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    starts = a.data_ptr(), b.data_ptr()
    ends = [x.data_ptr() + (1 + _reach(x)) * x.element_size() for x in (a, b)]
    return starts[0] < ends[1] and starts[1] < ends[0]


def _reach(x: Tensor) -> int:
    """The largest offset of an element."""
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


class PlacedOutput(Function):
    """y (R, N), a place (*lead, N), and how many rows count, a tensor of one element, or None for all of y ->
    the place, whose rows are those of y; rows beyond stay as they are.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, place: Tensor, counted: Tensor | None) -> Tensor:
        ctx.rows, ctx.counted = y.shape[0], counted
        rows = place.view(-1, place.shape[-1])[: y.shape[0]]
        rows.copy_(y if counted is None else torch.where(_before(counted, rows), y, rows))
        return place.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        rows = gradients[0].reshape(-1, gradients[0].shape[-1])[: ctx.rows]
        return rows if ctx.counted is None else rows.masked_fill(~_before(ctx.counted, rows), 0), None, None


class PlacedGradient(Function):
    """x (*lead, K), R, a place of x's shape, and how many rows count, likewise -> the first rows of x, (R, K).

    Their gradient goes to the place, whose other rows stay as they are, and the place is the gradient of x. Under
    `create_graph` the gradient of x is a new tensor with zeros there, because a graph must not be written over.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int, place: Tensor, counted: Tensor | None) -> Tensor:
        ctx.place, ctx.counted = place, counted
        return x.reshape(-1, x.shape[-1])[:rows]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,), place = gradients, ctx.place
        PlacedOutput.forward(ctx, gradient.detach(), place, ctx.counted)
        if not torch.is_grad_enabled():
            return place.detach(), None, None, None
        left = place.numel() // place.shape[-1] - gradient.shape[0]
        return torch.nn.functional.pad(gradient, (0, 0, 0, left)).view(place.shape), None, None, None


def _before(counted: Tensor, rows: Tensor) -> Tensor:
    """bool (R, 1): whether a row is one of the first `counted`."""
    return (torch.arange(rows.shape[0], device=rows.device) < counted).unsqueeze(-1)
