"""Master weights: which parameters have one, and what it starts from."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from duotone.tensor import QuantizedTensor


def needs_master(parameter: Tensor, group: dict[str, Any]) -> bool:
    """Whether a parameter is held quantized or, where the group asks for masters, in fewer bits than fp32."""
    if isinstance(parameter, QuantizedTensor):
        return True
    return group["master_weights"] and parameter.is_floating_point() and parameter.dtype.itemsize < 4


def initial_master(parameter: Tensor) -> Tensor:
    """fp32, contiguous, memory of its own: what the parameter was made of, where it preserved that, else its values.

    A preserved value counts while nothing has been written since, a checkpoint say; the master takes its place.
    """
    values = None
    if isinstance(parameter, QuantizedTensor):
        values = parameter.get_high_precision_init_val() if parameter._version == 0 else None
        parameter.clear_high_precision_init_val()
    values = values_of(parameter) if values is None else values
    return torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device).copy_(values)


def values_of(parameter: Tensor) -> Tensor:
    """What a parameter holds, without a gradient; fp32 where it is quantized."""
    return parameter.values(torch.float32) if isinstance(parameter, QuantizedTensor) else parameter.detach()


class Mark(NamedTuple):
    """What a step left: the memory that it wrote, and the version of that. The reference frees nothing and keeps the
    address from being used again."""

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
        """Whether somebody else wrote this memory; a parameter that was converted or moved has another, and keeps its
        master."""
        now = Mark.of(parameter)
        return now.version != self.version and now.memory == self.memory
