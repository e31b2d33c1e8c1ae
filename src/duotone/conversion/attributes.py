"""Attributes of modules that their code reads: a pipeline in place of a forward follows the values at `fuse`."""

import inspect
from collections.abc import Iterator, Mapping
from enum import Enum
from types import CodeType, MethodType

import torch
from torch import nn

from duotone.conversion.trial import is_dropout

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, Enum, tuple)
FORWARD = "forward"


class Absent:
    """Stands for an attribute that a module does not have. Copies and pickles keep the class itself."""


class Attributes:
    """Attributes that the code of a module's class reads, with their values: `self.scale`, but no tensors and children.

    Neither is the mode, in which nothing else changes. An attribute or a child that comes later is a change, too.
    """

    def __init__(self, module: nn.Module, plain: type[nn.Module]) -> None:
        self.plain, self.forward, self.names = plain, plain.forward, _names(module)
        read = {name for method, code in code_of_class(plain) if method != "__init__" for name in _words(code)}
        read -= {"training", *vars(nn.Module), *module._parameters, *module._buffers, *module._modules}
        values = {name: value_of(module, name) for name in sorted(read)}
        self.values = {name: value for name, value in values.items() if value is not Absent}
        self.absent = [name for name, value in values.items() if value is Absent]

    def changed(self, module: nn.Module) -> str:
        """The name of one that has another value now, or ""."""
        if self.plain.forward is not self.forward:
            return FORWARD
        if not torch.compiler.is_dynamo_compiling():
            if other := _names(module) ^ self.names:
                return min(other)
        elif come := [name for name in self.absent if hasattr(module, name)]:  # so that guards ask
            return come[0]
        return next((name for name, before in self.values.items() if not _same(value_of(module, name), before)), "")


def _names(module: nn.Module) -> set[str]:
    """What a module has by name, except what libraries keep for themselves and the forward that they replace."""
    of_module = {name for name in module.__dict__ if name[0] != "_"} - {FORWARD}
    return of_module.union(module._parameters, module._buffers, module._modules)


def _words(code: CodeType) -> list[str]:
    """The names in code, also those in quotes."""
    return [*code.co_names, *(word for word in code.co_consts if isinstance(word, str) and word.isidentifier())]


def attributes_within(children: Mapping[str, nn.Module]) -> list[tuple[str, Attributes]]:
    """The attributes of children, and of modules in them, by path, with the forward. Dropout is asked otherwise."""
    found = []
    for name, child in children.items():
        for path, module in child.named_modules(prefix=name):
            if path != name or not is_dropout(module):
                found.append((path, Attributes(module, type(module))))
                found[-1][1].values[FORWARD] = value_of(module, FORWARD)
    return found


def value_of(module: nn.Module, name: str) -> object:
    """An attribute, `Absent` if there is none. Of a method the function, since each access makes another method."""
    value = getattr(module, name, Absent)
    return value.__func__ if isinstance(value, MethodType) else value


def _same(value: object, before: object) -> bool:
    """Whether an attribute is as before: an equal number, name or tuple of them, or the same object."""
    return value is before or (isinstance(before, PLAIN) and type(value) is type(before) and value == before)


def code_of_class(kind: type[nn.Module]) -> Iterator[tuple[str, CodeType]]:
    """The code of each method of a class, with the method's name, but none of torch's nn.Module."""
    for base in kind.__mro__:
        for name, member in vars(base).items() if base not in nn.Module.__mro__ else ():
            yield from ((name, code) for code in _code_of(member))


def _code_of(member: object) -> Iterator[CodeType]:
    """The code of a function, and of functions inside of it."""
    code = getattr(inspect.unwrap(member) if callable(member) else member, "__code__", member)
    if isinstance(code, CodeType):
        yield code
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from _code_of(constant)
