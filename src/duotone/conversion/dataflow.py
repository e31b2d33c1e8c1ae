"""Which code reads which value in the forward of a module, from its source. Nothing runs, so all branches count."""

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from duotone.conversion.forward_source import code_of
from duotone.conversion.fused_modules import plain_class
from duotone.conversion.left_alone import DESCRIPTIONS

Names = frozenset[str]
NOTHING: Names = frozenset()


@dataclass
class Reads:
    """The readers of a value: children, and the text of other code."""

    children: list[tuple[str, int | str, bool]] = field(default_factory=list)
    """Path, index or name of the argument, and whether every call of the forward reads the value in this place."""

    others: list[str] = field(default_factory=list)


class Flow:
    """The reads of each parameter of a forward, and of each output of a child, by name.

    A name that starts with "self." is the output of a child.
    """

    parameters: list[str]
    reads: dict[str, Reads]


class SequentialFlow(Flow):
    """The flow of nn.Sequential: each child reads the output of the one before it."""

    def __init__(self, children: Sequence[str]) -> None:
        self.parameters = ["input"]
        values = ["input", *(f"self.{child}" for child in children)]
        self.reads = {value: Reads([(child, 0, True)]) for value, child in zip(values, children, strict=False)}
        self.reads[values[-1]] = Reads(others=["the caller"])


class CodeFlow(Flow):
    """The flow that the source of a module's forward shows."""

    def __init__(self, function: ast.FunctionDef, module: nn.Module) -> None:
        self.module = module
        self.parameters = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)][1:]
        keyword_only = [argument.arg for argument in function.args.kwonlyargs]
        self.reads: dict[str, Reads] = {}
        self.branches = 0
        self.values: dict[str, Names] = {name: frozenset({name}) for name in (*self.parameters, *keyword_only)}
        self.run(function.body)

    def run(self, statements: Iterable[ast.stmt]) -> None:
        """Follow statements one by one."""
        for statement in statements:
            self.step(statement)

    def step(self, statement: ast.stmt) -> None:
        """Follow one statement."""
        if isinstance(statement, ast.Assign):
            source = self.value(statement.value)
            for target in statement.targets:
                self.bind(target, source)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            self.bind(statement.target, self.value(statement.value))
        elif isinstance(statement, ast.AugAssign):
            self.note(statement, self.value(statement.value) | self.value(statement.target))
            self.bind(statement.target, NOTHING)
        elif isinstance(statement, ast.If) and (is_true := self.flag(statement.test)) is not None:
            self.run(statement.body if is_true else statement.orelse)
        elif isinstance(statement, ast.If | ast.For | ast.While | ast.Try):
            self.branch(statement)
        elif isinstance(statement, ast.Return):
            if statement.value is not None:
                self.note(statement, self.value(statement.value))
        else:
            for part in ast.iter_child_nodes(statement):
                self.visit(statement, part)

    def visit(self, owner: ast.AST, part: ast.AST) -> None:
        """Read a part of a statement or of an expression, whatever it is."""
        if isinstance(part, ast.expr):
            self.note(owner, self.value(part))
        elif isinstance(part, ast.stmt):
            self.step(part)
        else:
            for inner in ast.iter_child_nodes(part):
                self.visit(owner, inner)

    def branch(self, statement: ast.If | ast.For | ast.While | ast.Try) -> None:
        """Each branch starts from the same values. Afterwards a name may stand for any of its values."""
        for part in (getattr(statement, "test", None), getattr(statement, "iter", None)):
            if part is not None:
                self.note(statement, self.value(part))
        before = dict(self.values)
        outcomes = [] if isinstance(statement, ast.If) else [before]
        self.branches += 1
        handlers = [handler.body for handler in getattr(statement, "handlers", ())]
        for body in (statement.body, getattr(statement, "orelse", []), *handlers, getattr(statement, "finalbody", [])):
            self.values = dict(before)
            self.run(body)
            outcomes.append(self.values)
        self.branches -= 1
        names = set().union(*outcomes)
        self.values = {name: frozenset().union(*(one.get(name, NOTHING) for one in outcomes)) for name in names}

    def bind(self, target: ast.expr, source: Names) -> None:
        """Follow an assignment of the values that `source` names."""
        if isinstance(target, ast.Name):
            self.values[target.id] = source
        elif isinstance(target, ast.Tuple | ast.List):
            for part in target.elts:
                self.bind(part, NOTHING)
            self.note(target, source)
        else:
            self.note(target, source)

    def value(self, expression: ast.expr) -> Names:
        """The parameters and outputs of children that an expression may be, unchanged."""
        if isinstance(expression, ast.Name):
            return self.values.get(expression.id, NOTHING)
        if isinstance(expression, ast.Call):
            return self.call(expression)
        if isinstance(expression, ast.IfExp):
            is_true = self.flag(expression.test)
            if is_true is not None:
                return self.value(expression.body if is_true else expression.orelse)
            self.note(expression, self.value(expression.test))
            self.branches += 1
            either = self.value(expression.body) | self.value(expression.orelse)
            self.branches -= 1
            return either
        if isinstance(expression, ast.Attribute):
            source = self.value(expression.value)
            if expression.attr not in DESCRIPTIONS:
                self.note(expression, source)
            return NOTHING
        if isinstance(expression, ast.Compare) and isinstance(expression.ops[0], ast.Is | ast.IsNot):
            return NOTHING
        for part in ast.iter_child_nodes(expression):
            self.visit(expression, part)
        return NOTHING

    def flag(self, test: ast.expr) -> bool | None:
        """The value of a flag of the module, as in `self.pre_norm` or `not self.config.tied`; None for other tests."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            flag = self.flag(test.operand)
            return None if flag is None else not flag
        path = _path(test)
        if not path or path.endswith("training"):
            return None
        value: object = self.module
        for step in path.split("."):
            value = getattr(value, step, None)
        return value if isinstance(value, bool) else None

    def call(self, call: ast.Call) -> Names:
        """The value that a call returns: the output of a child, or nothing that is followed further."""
        path = _path(call.func)
        arguments = [*enumerate(call.args), *((keyword.arg or "", keyword.value) for keyword in call.keywords)]
        if not path:
            self.value(call.func)
        for place, argument in arguments:
            source = self.value(argument)
            if path:
                for name in source:
                    always = not self.branches and len(source) == 1
                    self.reads.setdefault(name, Reads()).children.append((path, place, always))
            else:
                self.note(call, source)
        return frozenset({f"self.{path}"}) if path else NOTHING

    def note(self, node: ast.AST, source: Names) -> None:
        """Other code reads a value."""
        for name in source:
            self.reads.setdefault(name, Reads()).others.append(ast.unparse(node).split("\n")[0])


def _path(function: ast.AST) -> str:
    """The path of the child that is called, or ""."""
    steps = []
    while isinstance(function, ast.Attribute):
        steps.append(function.attr)
        function = function.value
    return ".".join(reversed(steps)) if isinstance(function, ast.Name) and function.id == "self" else ""


class Flows:
    """The flows of the forwards of a model."""

    def __init__(self, is_leaf: Callable[[nn.Module], bool]) -> None:
        self.is_leaf = is_leaf
        """Whether a module reads a value itself. Others are searched if they pass it to their children."""
        self.flows: dict[nn.Module, Flow | None] = {}
        self.code: dict[Callable[..., object], ast.FunctionDef | None] = {}

    def of(self, module: nn.Module) -> Flow | None:
        """The flow of the forward of a module's class; None if its source cannot be read."""
        forward = plain_class(module).forward
        if module not in self.flows and forward is nn.Sequential.forward:
            self.flows[module] = SequentialFlow(list(module._modules))
        elif module not in self.flows:
            if forward not in self.code:
                self.code[forward] = code_of(forward)
            code = self.code[forward]
            self.flows[module] = None if code is None else CodeFlow(code, module)
        return self.flows[module]

    def first_readers(self, module: nn.Module) -> list[str] | None:
        """The children that read the first argument of a module; None if its source cannot be read."""
        flow = self.of(module)
        if flow is None:
            return None
        reads = flow.reads.get(flow.parameters[0], Reads()) if flow.parameters else Reads()
        return list(dict.fromkeys(path for path, _, _ in reads.children))

    def readers(self, module: nn.Module, child: str) -> tuple[dict[str, bool], list[str]]:
        """The readers of a child's output: modules by path, and whether they always read it; the text of other code."""
        reads = list(self._reads(module, f"self.{child}"))
        return {path: always for path, always, text in reads if not text}, [text for *_, text in reads if text]

    def _reads(self, module: nn.Module, value: str) -> Iterator[tuple[str, bool, str]]:
        """(path, whether always, "") of each module that reads a value, ("", False, text) of other code."""
        flow = self.of(module)
        if flow is None:
            yield "", False, f"{type(module).__name__}.forward, which has no source"
            return
        reads = flow.reads.get(value, Reads())
        yield from (("", False, text) for text in reads.others)
        for path, place, always in reads.children:
            try:
                reader = module.get_submodule(path)
            except AttributeError:
                if hasattr(module, path.split(".")[0]):  # a method; an absent attribute is in a branch for other models
                    yield "", False, f"self.{path}"
                continue
            parameter = None if self.is_leaf(reader) else self._parameter(reader, place)
            if parameter is None:
                yield path, always, ""
            else:
                for inner, sure, text in self._reads(reader, parameter):
                    yield f"{path}.{inner}" if inner else "", always and sure, text

    def _parameter(self, reader: nn.Module, place: int | str) -> str | None:
        """The parameter of a module that gets an argument, if children of the module read it."""
        flow = self.of(reader)
        if flow is None or (isinstance(place, int) and place >= len(flow.parameters)):
            return None
        parameter = place if isinstance(place, str) else flow.parameters[place]
        return parameter if flow.reads.get(parameter, Reads()).children else None
