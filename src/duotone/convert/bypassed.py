"""Linears whose weight another module reads without ever calling them: what they would run is never run."""

import dis
import functools
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch import nn

from duotone.ops.planned import Planned

BYPASSED = "its owner uses the weight without calling the module"
LOADS = ("LOAD_ATTR", "LOAD_METHOD")
DESCRIPTION = ("dtype", "device", "shape", "size", "dim", "ndim", "numel", "requires_grad", "is_cuda")
"""What is read of a weight without multiplying by it."""


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
    """The attributes whose weight the forward of a class reads, and which no code of the class calls or hands on."""
    read = {attribute for attribute, loaded in _loads(inspect.getattr_static(kind, "forward")) if _is_read(loaded)}
    if not read:
        return frozenset()
    bases = [base for base in kind.__mro__ if base not in nn.Module.__mro__]
    code = [member for base in bases for member in vars(base).values()]
    used = {attribute for member in code for attribute, loaded in _loads(member) if not loaded or loaded[0] not in OWN}
    return frozenset(read - used)


OWN = ("weight", "bias", "in_features", "out_features")


def _is_read(loaded: tuple[str, ...]) -> bool:
    return loaded[:1] == ("weight",) and not (len(loaded) > 1 and loaded[1] in DESCRIPTION)


def _loads(function: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each attribute that a function loads, and the attributes that are loaded of it in turn."""
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    if isinstance(code, CodeType):
        yield from _loads_of(code)


def _loads_of(code: CodeType) -> Iterator[tuple[str, tuple[str, ...]]]:
    chain: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in LOADS:
            chain.append(instruction.argval)
        elif instruction.opname != "EXTENDED_ARG":
            yield from ((name, tuple(chain[i + 1 :])) for i, name in enumerate(chain))
            chain = []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _loads_of(constant)
