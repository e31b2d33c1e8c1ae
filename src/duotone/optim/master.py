"""Master weights: which parameters have one, and what it starts from."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from duotone.optim.update import Group
from duotone.tensor import QuantizedTensor


def needs_master(parameter: Tensor, group: Group) -> bool:
    """Whether a parameter is quantized or, if the group asks for masters, has fewer bits than fp32."""
    if isinstance(parameter, QuantizedTensor):
        return True
    return group["master_weights"] and parameter.is_floating_point() and parameter.dtype.itemsize < 4


def initial_master(parameter: Tensor) -> Tensor:
    """A new contiguous fp32 tensor: the preserved values from which the parameter was encoded, else its values.

    Preserved values count until the first write, such as a checkpoint. They are removed: the master replaces them.
    """
    values = None
    if isinstance(parameter, QuantizedTensor):
        values = parameter.get_high_precision_init_val() if parameter._version == 0 else None
        parameter.clear_high_precision_init_val()
    values = values_of(parameter) if values is None else values
    return torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device).copy_(values)


def values_of(parameter: Tensor) -> Tensor:
    """The values of a parameter, without a gradient; in fp32 if it is quantized."""
    return parameter.values(torch.float32) if isinstance(parameter, QuantizedTensor) else parameter.detach()


class Mark(NamedTuple):
    """The memory that a step wrote, and its version. The weak reference prevents that the address is used again."""

    memory: StorageWeakRef
    version: int

    @staticmethod
    def of(parameter: Tensor) -> "Mark":
        plane = None
        if isinstance(parameter, QuantizedTensor):
            plane = parameter.planes.rowwise or parameter.planes.columnwise
        codes = parameter if plane is None else plane.parts["codes"]
        return Mark(StorageWeakRef(codes.untyped_storage()), parameter._version)

    def was_written_since(self, parameter: Tensor) -> bool:
        """Whether other code wrote this memory. False for a parameter that was converted or moved to other memory."""
        now = Mark.of(parameter)
        return now.version != self.version and now.memory == self.memory
