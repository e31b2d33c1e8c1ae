"""The source of a forward as a syntax tree. Nothing runs."""

import ast
import inspect
import textwrap
from collections.abc import Callable


def code_of(forward: Callable[..., object]) -> ast.FunctionDef | None:
    """The syntax of a forward, whose first argument is called self in it. None if its source cannot be read."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(forward)))
        (function,) = ast.parse(source).body
    except (OSError, TypeError, ValueError, SyntaxError):
        return None
    if not isinstance(function, ast.FunctionDef):
        return None
    first = next((argument.arg for argument in (*function.args.posonlyargs, *function.args.args)), "self")
    for node in ast.walk(function):  # paths of children begin with "self", whatever the source calls it
        if isinstance(node, ast.Name) and node.id == first:
            node.id = "self"
    return function
