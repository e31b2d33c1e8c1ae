"""The fast path of torch's encoder layers, which in evaluation multiplies by the weights of its linears itself.

It would bypass converted linears without a warning. Torch takes it only if `activation_relu_or_gelu` is set, which
nothing else reads. An encoder packs padded batches for it if `use_nested_tensor` is set.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from duotone.planned.planned import Planned

SWITCH = {nn.TransformerEncoderLayer: "activation_relu_or_gelu", nn.TransformerEncoder: "use_nested_tensor"}
BEFORE = "_fast_path_before"


def close_fast_paths(model: nn.Module) -> None:
    """Let encoder layers that hold converted linears call them, in evaluation too."""
    for module, switch in _switches(model):
        if BEFORE not in module.__dict__ and any(isinstance(part, Planned) for part in module.modules()):
            module.__dict__[BEFORE] = getattr(module, switch)
            setattr(module, switch, type(getattr(module, switch))(0))


def open_fast_paths(model: nn.Module) -> None:
    """Undo `close_fast_paths`."""
    for module, switch in _switches(model):
        if BEFORE in module.__dict__:
            setattr(module, switch, module.__dict__.pop(BEFORE))


def is_closed(module: nn.Module) -> bool:
    return BEFORE in module.__dict__


def _switches(model: nn.Module) -> Iterator[tuple[Any, str]]:
    for module in model.modules():
        for kind, switch in SWITCH.items():
            if isinstance(module, kind) and hasattr(module, switch):
                yield module, switch
