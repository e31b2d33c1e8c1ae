"""What a forward does and reads besides computing its output. A pipeline in its place would leave it out.

All of this comes from the source of the forward, and of the methods that it calls. Values and gradients are compared
elsewhere.
"""

import ast
import builtins
import functools
import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import torch
from torch import nn

from duotone.conversion.forward_source import code_of
from duotone.pipeline.op import Op

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, Enum)
CODE = (FunctionType, BuiltinFunctionType, type, ModuleType)
TRUSTED = ("builtins", "collections", "duotone", "math", "torch", "transformers", "typing")
"""Packages whose functions and classes are taken to compute and do nothing else."""
NAMESPACES = {"globals", "locals", "vars", "eval", "exec"}
OTHER_SYNTAX = (ast.With, ast.AsyncWith, ast.Global, ast.Nonlocal, ast.Import, ast.ImportFrom, ast.Yield, ast.Await)
FORWARD = "forward"


class Absent:
    """Stands for an attribute that a module does not have. Copies and pickles keep the class itself."""


class Attributes:
    """Attributes of a module that its forward reads, with their values: `self.scale`, but no children and parameters.

    `plain` is the class of the module. `training` is none of them if `both_modes` were compared. Ops of Duotone have
    none.
    """

    def __init__(self, module: nn.Module, plain: type[nn.Module], both_modes: bool = False) -> None:
        methods = {} if isinstance(module, Op) else _methods(module, plain)
        paths = {path for code in methods.values() if code for _, path in _paths(code)}
        paths -= {"training"} if both_modes else set()
        values = {path: value_of(module, path) for path in sorted(paths) if not _is_tensor_or_child(module, path)}
        self.values = {path: _function(value) for path, value in values.items()}

    def changed(self, module: nn.Module) -> str:
        """The path of one that has another value now, or ""."""
        now = ((path, _function(value_of(module, path)), value) for path, value in self.values.items())
        return next((path for path, value, before in now if not _same(value, before)), "")


def effect_of(module: nn.Module, plain: type[nn.Module], no_autocast: bool = False) -> str:
    """What a forward does besides computing its output, in words, or "". `plain` is the class of the module.

    With `no_autocast` the pipeline runs only where torch.autocast is off, so the forward may turn it off.
    """
    if plain.__call__ is not nn.Module.__call__:
        return "it has a __call__ of its own"
    for name, code in _methods(module, plain).items():
        whose = "its forward" if name == FORWARD else f"its {name}"
        method = getattr(plain, name)
        if code is None:
            return f"{whose} has no source that could be read"
        if code.decorator_list:
            return f"{whose} is decorated by {ast.unparse(code.decorator_list[0])}"
        if inspect.unwrap(method) is not method:
            return f"{whose} is wrapped in another function"
        if effect := _effect_in(code, module, no_autocast) or _outside_of(code, method):
            return f"{whose} {effect}"
    return ""


def effects_of_children(module: nn.Module, names: list[str]) -> str:
    """What the forward of a child, or of a module in it, does besides computing its output, in words, or ""."""
    for name in names:
        for path, child in module._modules[name].named_modules(prefix=name):  # type: ignore[union-attr]
            if effect := effect_of(child, type(child)):
                return f"{path}: {effect}"
    return ""


def value_of(module: nn.Module, path: str) -> object:
    """The attribute at a path of names, `Absent` if there is none."""
    value: object = module
    for step in path.split("."):
        value = getattr(value, step, Absent)
    return value


def _effect_in(code: ast.FunctionDef, module: nn.Module, no_autocast: bool) -> str:
    """A statement of a method that does more than compute, or an attribute that can change in place."""
    called = {id(node.func) for node in ast.walk(code) if isinstance(node, ast.Call)}
    owners = {id(node.value) for node in ast.walk(code) if isinstance(node, ast.Attribute)}
    for node in ast.walk(code):
        is_written = isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load)
        is_statement = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
        if no_autocast and isinstance(node, ast.With) and all(map(_turns_autocast_off, node.items)):
            continue
        if isinstance(node, OTHER_SYNTAX) or is_written or is_statement:
            return f"has `{ast.unparse(node).splitlines()[0]}`"
        if isinstance(node, ast.Name) and node.id in ("self", "super") and id(node) not in owners:
            return f"uses {node.id} as a whole"
        if condition := _decides_by(node, module):
            return condition
    for node, path in _paths(code):
        value = value_of(module, path)
        if isinstance(value, MethodType) and value.__self__ is module:
            if id(node) not in called or "." in path or not hasattr(type(module), path):
                return f"uses self.{path}"
        elif not (_is_tensor_or_child(module, path) or _is_fixed(value)):
            return f"reads self.{path}, which can change in place"
    return ""


def _decides_by(node: ast.AST, module: nn.Module) -> str:
    """A condition on more than attributes of the module: it may hold for other inputs than those that are compared."""
    if not isinstance(node, ast.If | ast.IfExp | ast.While | ast.Match) or _is_only_a_cast(node):
        return ""
    test = node.subject if isinstance(node, ast.Match) else node.test
    chains = [(root, *path) for _, root, path in _chains(test)]
    others = [".".join(each) for each in chains if each[0] != "self" or each[1] in module._modules]
    return f"decides by {others[0]} in `{ast.unparse(test)}`" if others else ""


def _is_only_a_cast(node: ast.stmt | ast.expr) -> bool:
    """Whether a condition is around `x = x.to(...)` alone."""
    body = node.body if isinstance(node, ast.If) and not node.orelse else []
    casts = [each.value for each in body if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call)]
    names = [ast.unparse(each.func) for each in casts]
    return len(body) == len(names) == 1 and names[0] == f"{ast.unparse(body[0].targets[0])}.to"  # type: ignore[attr-defined]


def _turns_autocast_off(item: ast.withitem) -> bool:
    """Whether an entry of a `with` is `torch.autocast(..., enabled=False)`, or like it."""
    call = item.context_expr
    if not isinstance(call, ast.Call) or not ast.unparse(call.func).endswith("autocast"):
        return False
    return any(each.arg == "enabled" and ast.unparse(each.value) == "False" for each in call.keywords)


def _outside_of(code: ast.FunctionDef, method: Callable[..., object]) -> str:
    """A variable outside of a method that it reads, but nothing of the trusted packages."""
    variables = inspect.getclosurevars(method)
    values = {**vars(builtins), **variables.globals, **variables.nonlocals}
    for node, root, path in _chains(code):
        value: object = values.get(root, Absent)
        if value is Absent or isinstance(node.ctx, ast.Store):
            continue
        is_of_library = root in vars(builtins) or (isinstance(value, ModuleType) and _is_trusted(value))
        for step in path:
            value = getattr(value, step, Absent)
        if root in NAMESPACES or not (is_of_library or _is_trusted(value)):
            return f"reads {'.'.join((root, *path))} from outside"
    return ""


def _methods(module: nn.Module, plain: type[nn.Module]) -> dict[str, ast.FunctionDef | None]:
    """The code of the forward and of the methods that it calls, by name; None without a source."""
    methods: dict[str, ast.FunctionDef | None] = {}
    waiting = [FORWARD]
    while waiting:
        name = waiting.pop()
        code = methods[name] = code_of(getattr(plain, name))
        for _, path in _paths(code) if code is not None else ():
            is_method = isinstance(value_of(module, path), MethodType) and hasattr(plain, path)
            if is_method and path not in (*methods, *waiting):
                waiting.append(path)
    return methods


def _paths(code: ast.FunctionDef) -> Iterator[tuple[ast.Attribute, str]]:
    """The longest chains of attributes of self in a function."""
    for node, root, path in _chains(code):
        if root == "self" and isinstance(node, ast.Attribute):
            yield node, ".".join(path)


def _chains(code: ast.AST) -> Iterator[tuple[ast.Attribute | ast.Name, str, tuple[str, ...]]]:
    """The longest chains of attributes in a syntax tree: the node, the name in front and the attributes behind it."""
    inner = {id(node.value) for node in ast.walk(code) if isinstance(node, ast.Attribute)}
    for node in ast.walk(code):
        if not isinstance(node, ast.Attribute | ast.Name) or id(node) in inner:
            continue
        steps: list[str] = []
        part: ast.expr = node
        while isinstance(part, ast.Attribute):
            steps.insert(0, part.attr)
            part = part.value
        if isinstance(part, ast.Name):
            yield node, part.id, tuple(steps)


def _is_tensor_or_child(module: nn.Module, path: str) -> bool:
    """Whether a path leads to, or through, a parameter, buffer or child, which are compared elsewhere."""
    root, _, rest = path.partition(".")
    child = module._modules.get(root)
    if child is not None and rest and "." not in rest and rest not in {*child._parameters, *child._buffers}:
        return not isinstance(value_of(child, rest), PLAIN)
    return root in {*module._modules, *module._parameters, *module._buffers}


def _is_fixed(value: object) -> bool:
    """Whether a value cannot change in place."""
    if isinstance(value, functools.partial):
        return _is_fixed((value.func, *value.args, *value.keywords.values()))
    is_tuple = isinstance(value, tuple) and all(map(_is_fixed, value))
    return is_tuple or value is Absent or isinstance(value, PLAIN) or _is_trusted(value)


def _is_trusted(value: object) -> bool:
    """Whether a value is a module, class or function of a trusted package. Functions in C may not name their own."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or "torch"
    return isinstance(value, CODE) and name.partition(".")[0] in TRUSTED


def _function(value: object) -> object:
    """The function of a method, which is another object in each access; any other value itself."""
    return value.__func__ if isinstance(value, MethodType) else value


def _same(value: object, before: object) -> bool:
    """Whether an attribute is as before: an equal number, name or tuple of them, or the same object."""
    if value is before:
        return True
    if isinstance(value, functools.partial) and isinstance(before, functools.partial):  # copies differ
        return (value.func, value.args, value.keywords) == (before.func, before.args, before.keywords)
    return isinstance(before, (*PLAIN, tuple)) and type(value) is type(before) and value == before
