"""Entries of a state_dict: code that reads memory at an address, as safetensors does, finds the values there."""

import torch
from torch import Tensor, nn

from duotone.errors import UserError
from duotone.tensor.plane_tensor import PlaneTensor

ENTRY = "_values_by_address"
"""Marks an entry. It holds a copy of the values as soon as their address was asked for."""


class StateEntry(PlaneTensor):
    """Mixed into QuantizedTensor. A parameter has no address: what other code writes there would be lost."""

    def data_ptr(self) -> int:
        """The address of a copy of the values in the nominal dtype. UserError unless this is a state_dict's entry."""
        if not is_entry(self):
            raise UserError(
                "a quantized tensor is planes, and has no address of values; use dequantize(), or save state_dict()"
            )
        return self._values_now().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory at `data_ptr()`; without bytes if this is no entry of a state_dict."""
        return self._values_now().untyped_storage() if is_entry(self) else super().untyped_storage()

    def _values_now(self) -> Tensor:
        """The copy, which keeps its address, with the values that the planes have now."""
        values, copy = self.values(self.dtype), vars(self)[ENTRY]
        if copy is None:
            copy = vars(self)[ENTRY] = torch.empty_like(values)
        return copy.copy_(values)


def mark_entry(t: Tensor | None) -> None:
    """Let the values of a quantized tensor be read at its address. Other tensors stay as they are."""
    if isinstance(t, PlaneTensor) and not isinstance(t, nn.Parameter):
        vars(t)[ENTRY] = None


def is_entry(t: PlaneTensor) -> bool:
    return ENTRY in vars(t) and not isinstance(t, nn.Parameter)
