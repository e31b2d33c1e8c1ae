"""Forwards that another library replaced on a module. If they call the class's forward, they follow a change of class.

Accelerate's hooks store the forward that they call in `_old_forward`, and leave `forward` behind when they are removed.
Both are methods of the class that the module had then.
"""

import functools
from collections.abc import Iterator
from types import MethodType

import torch
from torch import nn

from duotone.modules.planned import Planned
from duotone.state import seeds

PLACES = ("forward", "_old_forward")

CONVERTED = "_converted"
"""The mark of a module whose class convert changes: False while `convert` or `revert` is at work, then True or gone."""


def is_replaced(module: nn.Module) -> bool:
    """Whether calls of the module may never reach the forward of its class."""
    return "forward" in module.__dict__ and not _class_forwards(module)


def replacement(module: nn.Module) -> str:
    """The name of the code that replaced the forward."""
    forward = module.__dict__["forward"]
    code = getattr(forward, "func", forward)  # a functools.partial has one
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
    """Change the class of a module. The forward of the new class replaces that of the old one, in hooks too.

    Wherever an interrupt stops this, a change back to the base of the two classes completes it: only the derived class
    meets a forward of the other one.
    """
    replaced = {name: MethodType(kind.forward, module) for name in _class_forwards(module)}
    if not isinstance(module, kind):
        module.__class__ = kind
    module.__dict__.update(replaced)
    module.__class__ = kind


@functools.cache
def planned_class(mixin: type, kind: type) -> type[nn.Module]:
    """The class `kind` whose calls follow plans: `mixin` comes first."""
    members = {"__module__": kind.__module__, "__reduce__": lambda self: (rebuild, (mixin, kind), self.__getstate__())}
    return type(f"{getattr(mixin, 'prefix', 'Planned')}{kind.__name__}", (mixin, kind), members)  # type: ignore[return-value]


def rebuild(mixin: type, kind: type) -> nn.Module:
    """An empty module of a `planned_class`, for pickle to fill."""
    planned = planned_class(mixin, kind)
    return planned.__new__(planned)


def owner_of(module: Planned) -> nn.Module:
    """The module with the parameters and the hooks: of experts, that around them."""
    owner: nn.Module = module.__dict__.get("_owner", module)
    return owner


def move_states_to_hooks_device(module: Planned) -> None:
    """Move seeds and states of an offloaded module, whose weights are on meta, to the device on which hooks run it."""
    hook = owner_of(module).__dict__.get("_hf_hook")
    devices = [getattr(one, "execution_device", None) for one in getattr(hook, "hooks", (hook,))]
    device = next((torch.device(device) for device in devices if device is not None), None)
    if device is None or not module.weight.is_meta:
        return
    module._buffers[seeds.BUFFER] = seeds.initial_seed(module.module_name).to(device)
    for state in module.children():
        state._apply(lambda part: torch.empty_like(part, device=device) if part.is_meta else part.to(device))


SWITCH = {nn.TransformerEncoderLayer: "activation_relu_or_gelu", nn.TransformerEncoder: "use_nested_tensor"}
BEFORE = "_fast_path_before"


def close_fast_paths(model: nn.Module) -> None:
    """Make encoder layers of torch call their converted linears in evaluation too.

    Their fast path multiplies by the weights of its linears itself, without a warning. Torch takes it only if
    `activation_relu_or_gelu` is set, which nothing else reads. An encoder packs padded batches for it if
    `use_nested_tensor` is set.
    """
    for module, switch in _switches(model):
        if any(isinstance(part, Planned) for part in module.modules()):
            module.__dict__.setdefault(BEFORE, getattr(module, switch))
            setattr(module, switch, type(getattr(module, switch))(0))


def open_fast_paths(model: nn.Module) -> None:
    """Undo `close_fast_paths`."""
    for module, switch in _switches(model):
        if BEFORE in module.__dict__:
            setattr(module, switch, module.__dict__[BEFORE])
            del module.__dict__[BEFORE]


def is_fast_path_closed(module: nn.Module) -> bool:
    """Whether `close_fast_paths` changed this module."""
    return BEFORE in module.__dict__


def _switches(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for module in model.modules():
        for kind, switch in SWITCH.items():
            if isinstance(module, kind) and hasattr(module, switch):
                yield module, switch
