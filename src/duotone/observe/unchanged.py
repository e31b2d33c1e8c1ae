"""Running a model only to look at it: on which device, and with its gradients, buffers and random state restored."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from duotone.errors import UserError


def device_of(model: nn.Module) -> torch.device:
    """The one device of a model; the CPU for an empty one. UserError if there are several, or only meta tensors."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1 or torch.device("meta") in devices:
        names = ", ".join(sorted(map(str, devices)))
        raise UserError(f"the model lives on {names}; a ledger needs all of it on one device that holds data")
    return devices.pop() if devices else torch.device("cpu")


@contextmanager
def as_before(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run the block without earlier gradients. Afterwards gradients, buffers and random state are restored."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
