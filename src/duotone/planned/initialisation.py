"""Initial values of weights: at construction, on request, and after a module came from the meta device."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

INITIALISER = "_init_method"


def keep_initialiser(module: nn.Module, init_method: Callable[[Tensor], object] | None) -> None:
    """Remember what fills the weights; before nn.Module's own constructor runs."""
    module.__dict__[INITIALISER] = init_method


def materialise(module: nn.Module) -> None:
    """Bring parameters on meta to the default device, uninitialised; nothing happens while that is meta itself."""
    device = torch.get_default_device()
    if device.type != "meta" and any(p.is_meta for p in module.parameters(recurse=False)):
        module.to_empty(device=device, recurse=False)


def initialise(module: nn.Module, default: Callable[[], None]) -> None:
    """Materialise a module that is on meta, fill its parameters, and forget what was cached of them.

    `default` is what torch would do; an `init_method` fills the weights instead, and biases become zero.
    """
    if hasattr(module, "module_name"):  # at construction the caller's device decides
        materialise(module)
    init_method = module.__dict__.get(INITIALISER)
    if init_method is None:
        default()
        return
    with torch.no_grad():
        for name, parameter in module.named_parameters(recurse=False):
            if "bias" in name:
                parameter.zero_()
            elif "layer_norm" not in name:
                init_method(parameter)
