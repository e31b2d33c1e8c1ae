"""What modules hold by name: a pipeline follows the values at `fuse`, whatever code reads them."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from types import CodeType, FunctionType, MethodType

import torch
from torch import nn

from duotone.conversion.forwards import PLACES
from duotone.conversion.trial import is_dropout
from duotone.numbered import constant_in_traces

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, Enum)
FORWARD = "forward"

OWN = {*vars(nn.Module()), *PLACES, "_compiled_call_impl", "_fused", "_unfused", "_rewritten"}
"""Names under which torch, Duotone and accelerate keep what is theirs, among it the mode."""

LIBRARIES = ("__", "_abc_", "_hf_", "_is_hf_", "_fsdp_", "_is_fsdp_", "_is_torch_")
"""How other such names start, of Python, transformers, FSDP and torch."""


class Absent:
    """Stands for an attribute that a module does not have. Copies and pickles keep the class itself."""


class Members:
    """What a class holds by name, but no properties, which would run. Copies share it; a pickle reads the class."""

    def __init__(self, kind: type[nn.Module], plain: Mapping[str, object] | None = None) -> None:
        names = set[str]().union(*(vars(base) for base in kind.__mro__ if base not in nn.Module.__mro__))
        members = {name: inspect.getattr_static(kind, name) for name in _counted(names - OWN)}
        values = {name: getattr(member, "__func__", member) for name, member in members.items() if not _runs(member)}
        self.kind, self.values = kind, {FORWARD: kind.forward, **values, **(plain or {})}

    def __deepcopy__(self, memo: object) -> "Members":
        return self

    def __reduce__(self) -> tuple[object, ...]:  # pickle finds no function whose decorator hides its name
        return Members, (self.kind, {name: value for name, value in self.values.items() if isinstance(value, PLAIN)})


class Attributes:
    """All that a module and its class hold by name, but no parameters and buffers. A name that comes is a change, too.

    `plain` is the class of a module in whose place a pipeline runs, which knows its children.
    """

    def __init__(self, module: nn.Module, plain: type[nn.Module] | None = None) -> None:
        self.module, self.called, self.members = module, plain or module, Members(plain or type(module))
        self.names = self._names()
        held = vars(module) if plain else {**vars(module), **module._modules}
        self.values = {name: held[name] for name in _counted(held.keys() & self.names)}
        words = _words(self.members.kind).difference(OWN, vars(nn.Module), self.names, self.members.values)
        # Among them are properties, which may give methods.
        self.values |= {w: getattr(v := getattr(module, w, Absent), "__func__", v) for w in _counted(words)}

    def _names(self) -> set[str]:
        return {*vars(self.module), *self.module._parameters, *self.module._buffers, *self.module._modules} - OWN

    def changed(self) -> str:
        """The name of one that has another value now, or ""."""
        compiling = torch.compiler.is_dynamo_compiling()  # a guard sees a name that comes if the name is asked for
        for name, before in {**self.members.values, **self.values}.items():
            owner = self.called if name == FORWARD else self.module
            if (compiling or before is not Absent) and not _same(getattr(owner, name, Absent), before):
                return name
        return self._come()

    @constant_in_traces
    def _come(self) -> str:
        return next(iter(_counted(self._names() ^ self.names)), "")


def _counted(names: Iterable[str]) -> list[str]:
    return sorted([name for name in names if not name.startswith(LIBRARIES)])


def _runs(member: object) -> bool:
    """Whether reading a member of a class calls code, as that of a property."""
    return hasattr(type(member), "__get__") and not isinstance(member, FunctionType | staticmethod | classmethod)


def _same(value: object, before: object) -> bool:
    """Whether a value is as before: an equal number, name or tuple of them, the same object, or a method of it."""
    if isinstance(value, tuple) and isinstance(before, tuple):
        return type(value) is type(before) and len(value) == len(before) and all(map(_same, value, before))
    is_it = value is before or (isinstance(value, MethodType) and value.__func__ is before)
    return is_it or (isinstance(before, PLAIN) and type(value) is type(before) and value == before)


def _words(kind: type[nn.Module]) -> set[str]:
    """The names in the code of a class, also those in quotes."""
    code = [code for method, code in code_of_class(kind) if method != "__init__"]
    return {w for part in code for w in (*part.co_names, *part.co_consts) if isinstance(w, str) and w.isidentifier()}


def attributes_within(children: Mapping[str, nn.Module]) -> list[tuple[str, Attributes]]:
    """The attributes of children, and of modules in them, by path. Dropout is asked otherwise."""
    parts = [part for name, child in children.items() for part in child.named_modules(prefix=name)]
    return [(path, Attributes(part)) for path, part in parts if path not in children or not is_dropout(part)]


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
