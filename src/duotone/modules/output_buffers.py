"""Results in the caller's buffers: the output of a module, and the gradient of its input."""

import torch
from torch import Tensor

from duotone.custom_gradient import with_gradient
from duotone.errors import UserError
from duotone.tensor import QuantizedTensor
from duotone.tensor.plane import overlap


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
    if not (place.is_meta or isinstance(like, QuantizedTensor)) and overlap(place, like):
        raise UserError(f"{name} shares memory with the input; give a buffer of its own")


def placed_output(y: Tensor, place: Tensor, counted: Tensor | None) -> Tensor:
    """Write y (R, N) into the first rows of `place` (*lead, N), and return `place`. Other rows do not change.

    `counted`, a tensor of one element, is the number of rows of y that count; None: all rows.
    """
    count = y.shape[0]

    def gradients(dy: Tensor) -> tuple[Tensor]:
        rows = dy.reshape(-1, dy.shape[-1])[:count]
        return (rows if counted is None else rows.masked_fill(~_before(counted, rows), 0),)

    return with_gradient(lambda y: _write(y, place, counted), gradients, y)


def placed_gradient(x: Tensor, count: int, place: Tensor, counted: Tensor | None) -> Tensor:
    """The first `count` rows of x (*lead, K). `counted`, a tensor of one element, is the number of them that count.

    Their gradient goes to `place`, which has x's shape and is the gradient of x. Its other rows do not change. Under
    `create_graph` the gradient is a new tensor with zeros in other rows: a graph must not be written over.
    """

    def gradients(dy: Tensor) -> tuple[Tensor]:
        placed = _write(dy.detach(), place, counted)
        if not torch.is_grad_enabled():
            return (placed,)
        missing = place.numel() // place.shape[-1] - dy.shape[0]
        return (torch.nn.functional.pad(dy, (0, 0, 0, missing)).view(place.shape),)

    return with_gradient(lambda x: x.reshape(-1, x.shape[-1])[:count], gradients, x)


def _write(y: Tensor, place: Tensor, counted: Tensor | None) -> Tensor:
    rows = place.view(-1, place.shape[-1])[: y.shape[0]]
    rows.copy_(y if counted is None else torch.where(_before(counted, rows), y, rows))
    return place.detach()


def _before(counted: Tensor, rows: Tensor) -> Tensor:
    """bool (R, 1): whether a row is one of the first `counted`."""
    return (torch.arange(rows.shape[0], device=rows.device) < counted).unsqueeze(-1)
