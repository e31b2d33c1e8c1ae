"""Routing: tokens to the rows of their experts, and back. Gathers both ways, so that sums have one order."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from duotone.errors import UserError
from duotone.linear.row_counts import Rows


@dataclass(frozen=True, eq=False)
class Routing(Rows):
    """Where (T, k) choices of experts go: rows sorted by expert, and for each choice its row."""

    chosen: Tensor
    order: Tensor
    inverse: Tensor
    choices: int
    experts: int

    @staticmethod
    def of(index: Tensor, experts: int) -> "Routing":
        """From the chosen experts, int64 (T, k)."""
        flat = index.reshape(-1)
        order = torch.argsort(flat, stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        return Routing(flat, order, inverse, index.shape[-1], experts)

    @property
    def total(self) -> int:  # type: ignore[override]
        return self.chosen.numel()

    @cached_property
    def counts(self) -> Tensor:  # type: ignore[override]
        """Of choices that are known to be among the experts."""
        ends = torch.arange(self.experts, device=self.chosen.device)
        before = torch.searchsorted(self.chosen[self.order], ends, right=True)
        return torch.diff(before, prepend=before.new_zeros(1))

    @cached_property
    def splits(self) -> tuple[int, ...]:  # type: ignore[override]
        """UserError where a choice is not among the experts."""
        if not self.chosen.numel():
            return (0,) * self.experts
        if self.chosen.is_meta:
            raise UserError("tokens on meta are routed nowhere; move the module and its input to a device")
        counts = tuple(torch.bincount(self.chosen, minlength=self.experts).tolist())
        if len(counts) != self.experts:
            raise UserError(f"a token was routed to expert {len(counts) - 1}; there are {self.experts}, counted from 0")
        return counts

    def rows(self, x: Tensor) -> Tensor:
        """(T, H) -> (T k, H), each token once for each of its experts."""
        return ToExperts.apply(x, self)  # type: ignore[no-any-return]

    def combine(self, y: Tensor, weights: Tensor) -> Tensor:
        """(T k, H) of the experts and the weights (T, k) of the choices -> (T, H), summed in the order of `weights`."""
        chosen: Tensor = FromExperts.apply(y, self)  # type: ignore[assignment]
        parts = (chosen.view(-1, self.choices, y.shape[-1]) * weights.unsqueeze(-1)).to(y.dtype).unbind(1)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total


class ToExperts(torch.autograd.Function):
    """Rows by expert; the gradient of a token is the sum over its choices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        return x[routing.order // routing.choices]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        routing, dy = ctx.routing, gradients[0]
        return dy[routing.inverse].view(-1, routing.choices, dy.shape[-1]).sum(1), None


class FromExperts(torch.autograd.Function):
    """Rows in the order of the choices again."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        return y[routing.inverse]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][ctx.routing.order], None
