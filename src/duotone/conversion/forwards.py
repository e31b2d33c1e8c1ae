"""Forwards that another library replaced on a module. Those that end in the class's own follow a change of the class.

Accelerate's hooks store the forward that they call in `_old_forward`, and leave `forward` behind when they are removed.
Both are methods of the class that the module had then.
"""

import functools
from types import MethodType
from typing import Any

import torch
from torch import nn

from duotone.state import seeds

PLACES = ("forward", "_old_forward")


def is_replaced(module: nn.Module) -> bool:
    """Whether calls of the module may never reach the forward of its class."""
    return "forward" in module.__dict__ and not _class_forwards(module)


def replacement(module: nn.Module) -> str:
    """The name of the code that replaced the forward."""
    forward = module.__dict__["forward"]
    code = getattr(forward, "func", forward)  # of a functools.partial
    return f"{getattr(code, '__module__', '')}.{getattr(code, '__qualname__', type(code).__qualname__)}"


def _class_forwards(module: nn.Module) -> list[str]:
    """The attributes of a module that hold the forward of its class."""
    forward = type(module).forward
    methods = {name: module.__dict__.get(name) for name in PLACES}
    return [
        name
        for name, f in methods.items()
        if isinstance(f, MethodType) and f.__self__ is module and f.__func__ is forward
    ]


def change_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Give the module another class, whose forward takes the place of the one before it."""
    places = _class_forwards(module)
    module.__class__ = kind
    for name in places:
        module.__dict__[name] = MethodType(kind.forward, module)


@functools.cache
def planned_class(mixin: type, kind: type) -> Any:
    """The class `kind` whose calls follow plans: `mixin` comes first."""
    members = {"__module__": kind.__module__, "__reduce__": lambda self: (rebuild, (mixin, kind), self.__getstate__())}
    return type(f"{getattr(mixin, 'prefix', 'Planned')}{kind.__name__}", (mixin, kind), members)


def rebuild(mixin: type, kind: type) -> nn.Module:
    """An empty module of a `planned_class`, for pickle to fill."""
    planned = planned_class(mixin, kind)
    return planned.__new__(planned)


def settle(module: Any) -> None:
    """Move seeds and states to the device on which hooks run an offloaded module, whose weights are on meta."""
    device = _execution_device(module)
    if device is None or not module.weight.is_meta:
        return
    module._buffers[seeds.BUFFER] = seeds.initial_seed(module.module_name).to(device)
    for state in module.children():
        state._apply(lambda part: torch.empty_like(part, device=device) if part.is_meta else part.to(device))


def _execution_device(module: nn.Module) -> torch.device | None:
    hooked = module.__dict__.get("_owner", module)  # of experts
    hook = hooked.__dict__.get("_hf_hook")
    devices = (getattr(one, "execution_device", None) for one in getattr(hook, "hooks", (hook,)))
    return next((torch.device(device) for device in devices if device is not None), None)
