"""What the forward of a module does and reads besides computing its output. A pipeline in its place would leave it out.

All of this comes from the source of the forward. Values and gradients are compared elsewhere.
"""

import ast
import inspect
from collections.abc import Iterator
from enum import Enum
from types import MethodType

import torch
from torch import nn

from duotone.conversion.forward_source import code_of

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, Enum)
OTHER_SYNTAX = (ast.With, ast.AsyncWith, ast.Global, ast.Nonlocal, ast.Import, ast.ImportFrom, ast.Yield, ast.Await)


class Absent:
    """Stands for an attribute that a module does not have. Copies and pickles keep the class itself."""


class Attributes:
    """Attributes of a module that its forward reads, with their values: `self.scale`, but no children."""

    def __init__(self, module: nn.Module, plain: type[nn.Module]) -> None:
        function = code_of(plain.forward)
        paths = [] if function is None else [path for _, path in _paths(function)]
        roots = {path for path in paths if path.partition(".")[0] not in (*module._modules, "training")}
        self.values = {path: value_of(module, path) for path in sorted(roots)}

    def changed(self, module: nn.Module) -> str:
        """The path of one that has another value now, or ""."""
        return next((path for path, value in self.values.items() if not _same(value_of(module, path), value)), "")


def effect_of(module: nn.Module, plain: type[nn.Module]) -> str:
    """What a forward does besides computing its output, in words, or "". `plain` is the class of the module."""
    function = code_of(plain.forward)
    if function is None:
        return "its forward has no source that could be read"
    if function.decorator_list:
        return f"its forward is decorated by {ast.unparse(function.decorator_list[0])}"
    if inspect.unwrap(plain.forward) is not plain.forward:
        return "its forward is wrapped in another function"
    called = {id(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
    attributes = {id(node): path for node, path in _paths(function)}
    owners = {id(node.value) for node in ast.walk(function) if isinstance(node, ast.Attribute)}
    for node in ast.walk(function):
        is_written = isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load)
        is_statement = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
        if isinstance(node, OTHER_SYNTAX) or is_written or is_statement:
            return f"its forward has `{ast.unparse(node).splitlines()[0]}`"
        if isinstance(node, ast.Name) and node.id in ("self", "super") and id(node) not in owners:
            return f"its forward uses {node.id} as a whole"
        if id(node) in called and id(node) in attributes:
            method = value_of(module, attributes[id(node)])
            if isinstance(method, MethodType) and method.__self__ is module:
                return f"its forward calls self.{attributes[id(node)]}"
    return ""


def value_of(module: nn.Module, path: str) -> object:
    """The attribute at a path of names, `Absent` if there is none."""
    value: object = module
    for step in path.split("."):
        value = getattr(value, step, Absent)
    return value


def _paths(function: ast.FunctionDef) -> Iterator[tuple[ast.Attribute, str]]:
    """The longest chains of attributes of self in a function."""
    inner = {id(node.value) for node in ast.walk(function) if isinstance(node, ast.Attribute)}
    for node in ast.walk(function):
        steps: list[str] = []
        part: ast.expr | None = node if isinstance(node, ast.Attribute) and id(node) not in inner else None
        while isinstance(part, ast.Attribute):
            steps.insert(0, part.attr)
            part = part.value
        if isinstance(node, ast.Attribute) and isinstance(part, ast.Name) and part.id == "self":
            yield node, ".".join(steps)


def _same(value: object, before: object) -> bool:
    """Whether an attribute is as before: an equal number or name, or the same object."""
    return value is before or (isinstance(before, PLAIN) and type(value) is type(before) and value == before)
