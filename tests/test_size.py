"""How much code there is: code lines, since blank lines, comments, docstrings, imports and signatures are no cost.

A commit may lower a number. Only an issue that names a higher one raises it.
"""

import ast
from collections import Counter
from pathlib import Path

import duotone

ROOT = Path(duotone.__file__).parents[1]
NEIGHBOURS = {"compat", "serving", "integrations"}
MOST = {"library": 17_513, "neighbours": 2_922, "tools": 3_799}


def code_lines(source: str) -> int:
    """Count the lines that hold statements, except imports, docstrings and the headers of functions and classes."""
    skipped = set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min(each.lineno for each in (node, *node.decorator_list))
            skipped.update(range(first, max(node.body[0].lineno, node.lineno + 1)))
    lines = enumerate(source.splitlines(), 1)
    return sum(at not in skipped and bool(text.strip()) and not text.strip().startswith("#") for at, text in lines)


def kind(path: Path) -> str:
    """Name what a file of the two packages counts for."""
    package, room = path.relative_to(ROOT).parts[:2]
    return "tools" if package == "duotone_lab" else "neighbours" if room in NEIGHBOURS else "library"


def test_code_lines_do_not_grow() -> None:
    counts = Counter[str]()
    for path in ROOT.glob("duotone*/**/*.py"):
        counts[kind(path)] += code_lines(path.read_text())
    assert {name: count for name, count in counts.items() if count > MOST[name]} == {}, MOST


def test_what_counts() -> None:
    lines = (
        '"""Doc."""',
        "import os",
        "",
        "# why",
        "@decorated",
        "def f(",
        "    x,",
        "):",
        '    """Doc."""',
        "    y = (x)",
        "    return y",
    )
    assert code_lines("\n".join(lines)) == 2
