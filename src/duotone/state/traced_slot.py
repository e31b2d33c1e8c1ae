"""TracedSlot: a delayed slot in a graph that equal modules share.

The module that a call runs for comes into the graph as a tensor, so the op finds the state of that module. Eager and
compiled code record alike.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from duotone.dispatch.cast_ops import cast_planes, empty_planes
from duotone.state.delayed_slot import TAGS, measured_scale
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


_LIBRARY = torch.library.Library("duotone", "FRAGMENT")
WHERE = "Tensor x, Tensor handle, str plan, int member, str operand, int side"
_LIBRARY.define(f"traced_scale({WHERE}) -> Tensor", tags=TAGS)
_LIBRARY.define(
    f"traced_planes({WHERE}, str row, str col, bool propagate) -> (Tensor, Tensor, Tensor, Tensor)", tags=TAGS
)


def _scale(x: Tensor, *where: Any) -> Tensor:
    handle, *place = where
    return measured_scale(planner_of(handle).slot(*place), x)


def _fake_scale(x: Tensor, *_: object) -> Tensor:
    return x.new_empty((1,), dtype=torch.float32)


def _planes(x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    handle, *place, row, col, propagate = arguments
    scale, live = planner_of(handle).slot(*place).place(x)
    return cast_planes(x, row, col, propagate, scale, live)


def _fake_planes(x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *_, row, col, _ = arguments
    return empty_planes(x, row, col)


for _name, _kernel, _fake in (("traced_scale", _scale, _fake_scale), ("traced_planes", _planes, _fake_planes)):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _kernel, _key)
    # Not for the key "Meta": the handle and x may lie on two devices, which fake tensors refuse there.
    torch.library.register_fake(f"duotone::{_name}", _fake, lib=_LIBRARY)
