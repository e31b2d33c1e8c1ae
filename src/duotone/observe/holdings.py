"""Holdings: the storages that the modules of a model own between steps, and leaving them as they were."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from duotone.errors import UserError
from duotone.observe.storages import sizes
from duotone.state.delayed import DelayedState
from duotone.tensor.plane import Plane


@dataclass
class Holdings:
    """Bytes of weights and caches by module name, each storage with its first owner; `sizes` is by storage."""

    weights: dict[str, int] = field(default_factory=dict)
    caches: dict[str, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)

    def enter(self, column: dict[str, int], owner: str, tensor: Tensor) -> None:
        new = {key: size for key, size in sizes([tensor]).items() if key not in self.sizes}
        self.sizes.update(new)
        self.tensors.append(tensor)
        column[owner] = column.get(owner, 0) + sum(new.values())


def holdings(model: nn.Module) -> Holdings:
    """Parameters are weights. Caches are all other tensors that modules and parameters hold: buffers, delayed-scaling
    states (owned by their linear), seeds, cached planes, preserved values; gradients are neither."""
    result = Holdings()
    device = device_of(model)
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            result.enter(result.weights, name, parameter)
    for name, module in model.named_modules():
        owner = name.rpartition(".")[0] if isinstance(module, DelayedState) else name
        attributes = [value for key, value in vars(module).items() if key not in ("_parameters", "_modules")]
        beside = [list(vars(parameter).values()) for parameter in module.parameters(recurse=False)]
        for tensor in _tensors([attributes, beside]):
            if tensor.device.type == device.type:
                result.enter(result.caches, owner, tensor)
    return result


def _tensors(values: object) -> Iterator[Tensor]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Plane):
            yield from leaf.parts.values()


def device_of(model: nn.Module) -> torch.device:
    """The one device of a model; the CPU for an empty one. UserError if there are several, or only meta tensors."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1 or torch.device("meta") in devices:
        names = ", ".join(sorted(map(str, devices)))
        raise UserError(f"the model lives on {names}; a ledger needs all of it on one device that holds data")
    return devices.pop() if devices else torch.device("cpu")


@contextmanager
def as_before(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run the block without gradients from before; afterwards they, buffers and random state are as they were."""
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
