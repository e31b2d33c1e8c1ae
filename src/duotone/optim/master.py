"""Master weights: which parameters have one, and what it starts from."""

from typing import Any

import torch
from torch import Tensor

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
        values = parameter.values(torch.float32) if values is None else values
    values = parameter.detach() if values is None else values
    return torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device).copy_(values)
