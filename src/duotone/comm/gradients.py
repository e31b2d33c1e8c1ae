"""Gradients of parameters that each rank has whole, and of which it sees a part of the rows."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from duotone.comm.collectives import all_reduce

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class SummedOver:
    """Sums gradients over the ranks of `group`, a c10d group name.

    A copy stays in the group. A pickle leaves it, because the name may mean another group in another process: then a
    backward raises UserError.
    """

    group: str

    @staticmethod
    def ranks(group: "ProcessGroup | None") -> "SummedOver | None":
        """The sum over the ranks of this group, None without one."""
        return None if group is None else SummedOver(group.group_name)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The same values. A backward takes one collective for all of them, and keeps their dtypes."""
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
            return tensors
        return _Sum.apply(self.group, *tensors)

    def __deepcopy__(self, memo: dict[int, object]) -> "SummedOver":
        return self

    def __reduce__(self) -> tuple[type["SummedOver"], tuple[str]]:
        return SummedOver, ("",)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[1:]
        parts = [grad for grad, need in zip(grads, needs, strict=True) if need]
        sums = iter(all_reduce(torch.stack(parts), "sum", ctx.group).unbind())
        return None, *(next(sums).to(grad.dtype) if need else None for grad, need in zip(grads, needs, strict=True))
