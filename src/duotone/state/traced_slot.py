"""TracedSlot: a delayed slot in a graph that equal modules share.

The module that a call runs for comes into the graph as a tensor, so the op finds the state of that module. Eager and
compiled code record alike.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from duotone.state.delayed_slot import define_slot_ops
from duotone.state.traced_stages import planner_of
from duotone.tensor.context import Slot


@dataclass(frozen=True)
class TracedSlot(Slot):
    """The slot of one plane in a plan of `PLANS`, for the module whose number `handle` holds, int64 (1,) on the CPU."""

    plan: str
    member: int
    operand: str
    side: int
    handle: Tensor | None = None

    def of_module(self, handle: Tensor) -> "TracedSlot":
        return replace(self, handle=handle)

    def scale_for(self, x: Tensor) -> Tensor:
        return torch.ops.duotone.traced_scale(x, self.handle, self.plan, self.member, self.operand, self.side)

    def cast(self, x: Tensor, row: str, col: str, propagate: bool) -> tuple[Tensor, ...]:
        where = (self.handle, self.plan, self.member, self.operand, self.side)
        return torch.ops.duotone.traced_planes(x, *where, row, col, propagate)


def _slot(handle: Tensor, plan: str, member: int, operand: str, side: int) -> Slot:
    return planner_of(handle).slot(plan, member, operand, side)


define_slot_ops("traced", "Tensor handle, str plan, int member, str operand, int side", _slot)
