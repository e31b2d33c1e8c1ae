"""TracedSlot: the delayed slot of an operand of attention in graphs, which modules share."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from duotone.modules.traced_stages import number_of, owner_of
from duotone.state.delayed_slot import define_slot_op
from duotone.tensor.context import Slot


@dataclass(frozen=True)
class TracedSlot(Slot):
    """The delayed slot of an operand of a stage, by its number. The op finds that of the module of the `handle`."""

    stage: str
    operand: str
    side: int
    handle: Tensor

    def scale_for(self, x: Tensor) -> Tensor:
        return torch.ops.duotone.traced_scale(x, self.handle, self.stage, self.operand, self.side)


def _slot(handle: Tensor, *place: Any) -> Slot:
    return owner_of(number_of(handle)).slot(*place)


define_slot_op("traced_scale", "Tensor handle, str stage, str operand, int side", _slot)
