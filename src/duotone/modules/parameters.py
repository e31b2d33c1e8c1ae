"""Quantized parameters: weights that exist only as planes, made when a module is built or converted all at once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from duotone.tensor import QuantizedTensor, Quantizer
from duotone.tensor.plane import Usage
from duotone.tensor.quantized import INIT_VALUE


def quantized_parameter(weight: Tensor, quantizer: Quantizer, *, preserve: bool) -> nn.Parameter:
    """A parameter over planes of `weight` alone; columnwise planes where gradients are enabled now.

    `preserve` keeps the high-precision values on the CPU: `get_high_precision_init_val()`.
    """
    usage = Usage(True, torch.is_grad_enabled())
    requires_grad = weight.requires_grad
    made = nn.Parameter(quantizer.make(weight, usage), requires_grad=requires_grad)
    if preserve:
        setattr(made, INIT_VALUE, weight.detach().to("cpu", copy=True))
    return made


def replace(old: nn.Parameter, new: nn.Parameter) -> None:
    """Make the parameter object `old` be `new`, so that optimizers and ties keep it."""
    new.requires_grad_(old.requires_grad)
    kept = old.__dict__.get(INIT_VALUE)
    if kept is not None and isinstance(new, QuantizedTensor):
        setattr(new, INIT_VALUE, kept)
    torch.utils.swap_tensors(old, new)


def moved(parameter: Any, fn: Callable[[Tensor], Tensor]) -> None:
    """Apply a module-wide conversion to a quantized parameter: device and nominal dtype follow, bytes stay."""
    probe = fn(torch.empty(0, dtype=parameter.dtype, device=parameter.device))
    if probe.device == parameter.device and probe.dtype == parameter.dtype:
        return

    def move(part: Tensor) -> Tensor:
        return torch.empty_like(part, device=probe.device) if part.is_meta else part.to(probe.device)

    planes = parameter.planes.map(move)
    made = QuantizedTensor(planes, parameter.quantizer, parameter.shape, probe.dtype, device=probe.device)
    made.context = parameter.context
    replace(parameter, nn.Parameter(made, requires_grad=parameter.requires_grad))
