"""What a script uses of Transformer Engine, by its text: what runs after `install()`, and what to write instead."""

import ast
import inspect
import itertools
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from duotone.compat.transformer_engine.instead import INSTEAD, MODULES_WITHOUT
from duotone.compat.transformer_engine.names import MODULES, NATIVE, PACKAGE
from duotone.compat.transformer_engine.optimizers import ADAM, SGD
from duotone.compat.transformer_engine.options import OF_FUNCTIONS, ORDER, RENAMED, Rule, rule_of
from duotone.compat.transformer_engine.recipe import UNUSED
from duotone.errors import UserError

ROOT = "transformer_engine"
RUNS, REFUSED, DEPENDS = "runs", "refused", "depends"
OF_RANKS = "attention_type cp_group device get_rng_state_tracker sequence_parallel set_parallel_mode tp_group".split()
"""Options that modules take in a way of their own."""
UNKNOWN = "no counterpart: see docs/from-te.md"


@dataclass(frozen=True)
class Use:
    """A name or an option in a script.

    After `install()` it runs, is refused, or depends on a value that the text does not show.
    """

    line: int
    call: str
    after_install: str
    write: str

    def to_dict(self) -> dict[str, int | str]:
        """The fields by name, for JSON."""
        return asdict(self)


def uses(text: str, name: str = "the script") -> list[Use]:
    """The uses in the order of their lines. UserError if the text is no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{name} is no Python that this version reads: {error}") from None
    script = Script(tree)
    return sorted({*script.imports(), *script.references(), *script.calls()}, key=lambda use: (use.line, use.call))


class Script:
    """The syntax tree of a script, and the full names of its imports."""

    def __init__(self, tree: ast.Module) -> None:
        self.nodes = list(ast.walk(tree))
        self.paths: dict[str, str] = {}
        self.imported: list[tuple[int, str]] = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._add(node.lineno, alias.asname or alias.name.partition(".")[0], alias.name, bool(alias.asname))
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    self._add(node.lineno, alias.asname or alias.name, f"{node.module}.{alias.name}", True)
                    for name in MODULES.get(node.module, ()) if alias.name == "*" else ():
                        self.paths.setdefault(name, f"{node.module}.{name}")

            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                if module := _imported_by_call(node.value):
                    self._add(node.lineno, node.targets[0].id, module, True)

    def _add(self, line: int, name: str, path: str, is_whole: bool) -> None:
        if path.partition(".")[0] in (ROOT, f"{ROOT}_torch"):
            self.paths[name] = path if is_whole else path.partition(".")[0]
            self.imported.append((line, path))

    def path(self, node: ast.expr) -> str:
        """The full name of an expression, or "" if it is not of Transformer Engine."""
        if isinstance(node, ast.Name):
            return self.paths.get(node.id, "")
        value, name = _attribute(node)
        base = self.path(value) if value is not None else ""
        return f"{base}.{name}" if base else ""

    def imports(self) -> Iterator[Use]:
        """Imports that fail."""
        for line, path in self.imported:
            module, name = split(path)
            if name == "*":
                yield Use(
                    line, f"from {module} import *", RUNS if MODULES.get(module) else REFUSED, "name what is imported"
                )
            elif name and not remedy(module, name) and name not in MODULES.get(module, ()):
                yield Use(line, path, REFUSED, UNKNOWN)

    def references(self) -> Iterator[Use]:
        """Names, called or not: a script may put a class into a variable, or inherit from it."""
        for node in (node for node in self.nodes if isinstance(node, ast.Name | ast.Attribute | ast.Call)):
            module, name = split(self.path(node))
            if name and module in MODULES:
                path = MODULES[module].get(name)
                status = RUNS if path else REFUSED
                yield Use(node.lineno, name, status, native(path) if path else remedy(module, name) or UNKNOWN)

    def calls(self) -> Iterator[Use]:
        """Options that are refused, and inputs under their names in Transformer Engine."""
        renamed = self._renamed()
        inherited = {call: path for node in self.nodes for path, call in self._calls_of_bases(node)}
        for node in (node for node in self.nodes if isinstance(node, ast.Call)):
            path, call = self._called(node, renamed, inherited)
            module, name = split(path)
            if name:
                yield from options(call, name, MODULES.get(module, {}).get(name, ""))
            elif any(keyword.arg == "inp" for keyword in node.keywords):
                yield Use(node.lineno, f"{ast.unparse(node.func)}(inp=)", RUNS, "name it x, or give it by position")

    def _called(
        self, node: ast.Call, renamed: dict[str, tuple[str, bool]], inherited: dict[ast.Call, str]
    ) -> tuple[str, ast.Call]:
        """The full name of what a call calls, and the call with the arguments that this gets."""
        func = node.func
        if ast.unparse(func) in PARTIAL and node.args:
            return self.path(node.args[0]), _without_arguments(node, 1)
        if isinstance(func, ast.Attribute) and func.attr == "__init__" and (path := self.path(func.value)):
            return path, _without_arguments(node, 1)
        if node in inherited:
            return inherited[node], node
        path, is_partial = renamed.get(func.id, ("", False)) if isinstance(func, ast.Name) else ("", False)
        return path or self.path(func), _without_arguments(node, len(node.args) if is_partial else 0)

    def _renamed(self) -> dict[str, tuple[str, bool]]:
        """Variables and subclasses that stand for a name of Transformer Engine, and whether some arguments are set."""
        renamed: dict[str, tuple[str, bool]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                value, is_partial = node.value, False
                if isinstance(value, ast.Call) and ast.unparse(value.func) in PARTIAL and value.args:
                    value, is_partial = value.args[0], True
                if path := self.path(value):
                    renamed[node.targets[0].id] = path, is_partial
            elif isinstance(node, ast.ClassDef) and "__init__" not in _methods(node):
                if path := next(filter(None, map(self.path, node.bases)), ""):
                    renamed[node.name] = path, False
        return renamed

    def _calls_of_bases(self, node: ast.AST) -> Iterator[tuple[str, ast.Call]]:
        """The calls of `super().__init__` in a class that inherits from one of Transformer Engine."""
        for path in filter(None, map(self.path, node.bases)) if isinstance(node, ast.ClassDef) else ():
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and re.fullmatch(r"super\(.*\)\.__init__", ast.unparse(call.func)):
                    yield path, call


PARTIAL = "functools.partial", "partial"
IMPORTS = "importlib.import_module", "import_module"


def _attribute(node: ast.expr) -> tuple[ast.expr | None, str]:
    """The value and the name of `value.name`, or of getattr(value, "name"). (None, "") for all else."""
    if isinstance(node, ast.Attribute):
        return node.value, node.attr
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) > 1:
        if isinstance(node.args[1], ast.Constant):
            return node.args[0], str(node.args[1].value)
    return None, ""


def _imported_by_call(value: ast.expr) -> str:
    """The module that importlib.import_module("module") imports, or ""."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) in IMPORTS and len(value.args) == 1:
        (name,) = value.args
        return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else ""
    return ""


def _without_arguments(call: ast.Call, count: int) -> ast.Call:
    """A call without its first arguments by position."""
    return ast.copy_location(ast.Call(call.func, call.args[count:], call.keywords), call)


def _methods(node: ast.ClassDef) -> set[str]:
    return {each.name for each in node.body if isinstance(each, ast.FunctionDef)}


def split(path: str) -> tuple[str, str]:
    """The module and the name in it; no name for a module."""
    if path in MODULES:
        return path, ""
    module, _, name = path.rpartition(".")
    return module, name


def remedy(module: str, name: str) -> str | None:
    """What to write instead of a name without a counterpart."""
    return INSTEAD.get(name) or MODULES_WITHOUT.get(module)


def native(path: str) -> str:
    """What a script of Duotone writes for a name. `path` is the place of the name in Duotone."""
    return NATIVE.get(path) or NATIVE.get(path.partition(":")[2]) or path.replace(":", ".")


def options(call: ast.Call, name: str, path: str) -> Iterator[Use]:
    """Options that are refused, or would be with some values."""
    if _lacks_group(call, path):
        yield Use(call.lineno, f"{name}(tp_size=)", REFUSED, "give the tp_group of these ranks")
    for keyword in (*_positional(call, name, path), *call.keywords):
        if keyword.arg is None:
            remedy = "the script alone does not show these options; compare them with the page"
            yield Use(call.lineno, f"{name}(**{ast.unparse(keyword.value)})", DEPENDS, remedy)
            continue
        rule = _rule(name, keyword.arg, path)
        if rule is None:
            if _is_unknown(keyword.arg, name, path):
                text = "no option of this name is known here; compare with the page"
                yield Use(call.lineno, f"{name}({keyword.arg}=)", DEPENDS, text)
            continue
        is_harmless, remedy = rule
        try:
            value = ast.literal_eval(keyword.value)
        except ValueError:
            value = keyword.value.attr if isinstance(keyword.value, ast.Attribute) else None
            status = RUNS if is_harmless(value) and value is not None else DEPENDS
        else:
            status = RUNS if is_harmless(value) else REFUSED
        if status != RUNS and remedy:
            yield Use(call.lineno, f"{name}({keyword.arg}={ast.unparse(keyword.value)})", status, remedy)


def _positional(call: ast.Call, name: str, path: str) -> list[ast.keyword]:
    """Arguments by position under their names, as far as the order is known and no list is unpacked."""
    if name in OF_FUNCTIONS and path:
        order = list(inspect.signature(pkgutil.resolve_name(path)).parameters)
    else:
        order = ORDER.get(name, "").split()
    values = list(itertools.takewhile(lambda value: not isinstance(value, ast.Starred), call.args))
    return [ast.keyword(option, value) for option, value in zip(order, values, strict=False)]


def _lacks_group(call: ast.Call, path: str) -> bool:
    """Whether a module is split over ranks, and no group of them is given, now or later."""
    options = {keyword.arg: keyword.value for keyword in call.keywords}
    size = options.get("tp_size")
    is_split = isinstance(size, ast.Constant) and isinstance(size.value, int) and size.value > 1
    return is_split and not {"tp_group", "parallel_mode", None} & options.keys() and _is_module(path)


def _is_module(path: str) -> bool:
    return path.startswith(f"{PACKAGE}.pytorch:") and hasattr(pkgutil.resolve_name(path), "constructor")


def _is_unknown(option: str, name: str, path: str) -> bool:
    """Whether the constructor of a module does not know an option by any name."""
    if not _is_module(path):
        return False
    constructor = pkgutil.resolve_name(path).constructor
    return not {option, RENAMED.get(option)} & {*constructor, *ORDER.get(name, "").split(), *OF_RANKS}


def _rule(name: str, option: str, path: str) -> Rule | None:
    """Which values of an option run."""
    if name in OF_FUNCTIONS:
        return OF_FUNCTIONS[name].get(option)
    optimizers: dict[str, dict[str, Rule]] = {"FusedAdam": ADAM, "FusedSGD": SGD}
    if name in optimizers:
        return optimizers[name].get(option)
    fields = getattr(pkgutil.resolve_name(path), "__dataclass_fields__", None) if path else None
    if fields is None:
        return rule_of(option)
    if option in fields or option not in UNUSED:
        return None
    return (lambda value: value == UNUSED[option]), "write a RuleRecipe with those formats"
