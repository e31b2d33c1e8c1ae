"""Forwards that another library replaced on a module: those that end in the class's own go on over another class.

Accelerate's hooks keep the forward that they call in `_old_forward`, and leave `forward` behind when they are removed.
Both are methods of the class that the module had then, so they have to follow when the class changes.
"""

from types import MethodType
from typing import Any

import torch
from torch import nn

from duotone.state import seeds

PLACES = ("forward", "_old_forward")


def is_replaced(module: nn.Module) -> bool:
    """Whether calls of the module may never come to the forward of its class."""
    return "forward" in module.__dict__ and not own_forwards(module)


def replacement(module: nn.Module) -> str:
    """What took the place of the forward, by the name that its code has."""
    forward = module.__dict__["forward"]
    code = getattr(forward, "func", forward)  # of a functools.partial
    return f"{getattr(code, '__module__', '')}.{getattr(code, '__qualname__', type(code).__qualname__)}"


def own_forwards(module: Any) -> list[str]:
    """The attributes of a module that hold the forward of its class."""
    own = type(module).forward
    methods = {name: module.__dict__.get(name) for name in PLACES}
    return [
        name for name, f in methods.items() if isinstance(f, MethodType) and f.__self__ is module and f.__func__ is own
    ]


def change_class(module: Any, kind: type) -> None:
    """Give the module another class, whose forward takes the place of the one before it."""
    places = own_forwards(module)
    module.__class__ = kind
    for name in places:
        module.__dict__[name] = MethodType(kind.forward, module)  # type: ignore[attr-defined]


def settle(module: Any) -> None:
    """Bring seeds and states to where the hooks of an offloaded module, whose weights are on meta, execute it."""
    device = _execution_device(module)
    if device is None or not module.weight.is_meta:
        return
    module._buffers[seeds.BUFFER] = seeds.initial_seed(module.module_name).to(device)
    for state in module.children():
        state._apply(lambda part: torch.empty_like(part, device=device) if part.is_meta else part.to(device))


def _execution_device(module: Any) -> torch.device | None:
    hooked = module.__dict__.get("_owner", module)  # of experts
    hook = hooked.__dict__.get("_hf_hook")
    devices = (getattr(one, "execution_device", None) for one in getattr(hook, "hooks", (hook,)))
    return next((torch.device(device) for device in devices if device is not None), None)
