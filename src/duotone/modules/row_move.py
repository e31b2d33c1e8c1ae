"""Moves of rows that autograd undoes: tokens to their experts, and results back."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]


class RowMove(torch.autograd.Function):
    """See `move`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Map, back: Map) -> Tensor:
        ctx.back = back
        return there(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


def move(rows: Tensor, there: Map, back: Map) -> Tensor:
    """`there(rows)`, whose gradient is `back` of the output's gradient."""
    return RowMove.apply(rows, there, back)  # type: ignore[no-any-return]
