"""Linears whose weight another module reads without ever calling them: what they would run is never run."""

import dis
import functools
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch import nn

from duotone.planned.planned import Planned

BYPASSED = "its owner uses the weight without calling the module"
LOADS = ("LOAD_ATTR", "LOAD_METHOD")
DESCRIPTION = ("dtype", "device", "shape", "size", "dim", "ndim", "numel", "requires_grad", "is_cuda")
"""What is read of a weight without multiplying by it."""

OWN = (("weight",), ("bias",), ("in_features",), ("out_features",))
FILLING = ("init", "reset")
"""In the names of methods that fill parameters."""


def bypassed(model: nn.Module) -> dict[str, str]:
    """Linears by full name whose owner gives their weight to a function, as nn.MultiheadAttention does."""
    found = {}
    for name, module in model.named_modules():
        for child in bypassed_children(type(module)):
            linear = module._modules.get(child)
            if isinstance(linear, nn.Linear) and not isinstance(linear, Planned):
                found[f"{name}.{child}" if name else child] = BYPASSED
    return found


@functools.cache
def bypassed_children(kind: type[nn.Module]) -> frozenset[str]:
    """The attributes whose weight some code of a class reads, and which none of it calls or hands on.

    Code that only fills parameters does not count as reading.
    """
    members = [member for base in kind.__mro__ if base not in nn.Module.__mro__ for member in vars(base).items()]
    code = [(name, part) for name, member in members for part in _code_of(member)]
    computing = [part for name, part in code if not any(word in name for word in FILLING)]
    reading = [part for part in computing if "weight" in part.co_names]
    read = {attribute for part in reading for attribute, loaded in _loads(part) if _is_read(loaded)}
    if not read:
        return frozenset()
    used = {attribute for _, part in code for attribute, loaded in _loads(part) if loaded[:1] not in OWN}
    return frozenset(read - used)


def _is_read(loaded: tuple[str, ...]) -> bool:
    return loaded[:1] == ("weight",) and not (len(loaded) > 1 and loaded[1] in DESCRIPTION)


def _code_of(member: Any) -> Iterator[CodeType]:
    """The code of a function, and of what is defined in it."""
    code = getattr(inspect.unwrap(member) if callable(member) else member, "__code__", member)
    if isinstance(code, CodeType):
        yield code
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from _code_of(constant)


def _loads(code: CodeType) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each attribute that code loads, and the attributes that are loaded of it in turn."""
    chain: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in LOADS:
            chain.append(instruction.argval)
        elif instruction.opname != "EXTENDED_ARG":
            yield from ((name, tuple(chain[i + 1 :])) for i, name in enumerate(chain))
            chain = []
