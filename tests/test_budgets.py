"""Budgets: how many lines and how many `Any` each room may have, and names that say nothing. Numbers only fall."""

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import duotone

ROOT = Path(duotone.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
TOOLS = frozenset({"integrations", "lab", "report", "cli"})
LIBRARY_LINES = 42842
TOOL_LINES = 8355
BANNED = frozenset(
    "made given found there kept own held taken known done told gone asked wanted arrived mine said thing".split()
)
"""Words that do not say what a value is. Roles do: planes, stage, quantizer, options."""
BANNED_BESIDE = BANNED | {"got", "ours", "theirs"}
"""A bench or a test compares a result, or what runs (eager, compiled, loaded), with a reference."""
TESTS = Path(__file__).parent
BENCH = TESTS.parent / "bench"

BUDGETS = {
    "attention": (3030, 21, 0),
    "cli": (1655, 2, 0),
    "comm": (258, 3, 1),
    "compat": (3222, 11, 0),
    "conversion": (3171, 7, 0),
    "dispatch": (3655, 1, 0),
    "distributed": (507, 4, 0),
    "formats": (1538, 0, 0),
    "integrations": (1040, 17, 3),
    "kernels": (5048, 0, 0),
    "lab": (3915, 14, 0),
    "linear": (1990, 5, 0),
    "modules": (761, 3, 0),
    "observe": (2332, 6, 0),
    "ops": (1497, 0, 0),
    "optim": (900, 3, 0),
    "package": (423, 2, 0),
    "pipeline": (1685, 15, 0),
    "planned": (3949, 25, 2),
    "recipes": (2032, 6, 0),
    "report": (1745, 0, 0),
    "serving": (1731, 0, 0),
    "state": (2056, 13, 0),
    "tensor": (3057, 17, 0),
}
"""Room -> lines, uses of `Any`, names that are a banned word. Modules beside the rooms count as "package"."""

ROOMS = sorted(BUDGETS)


def room(path: Path) -> str:
    """The folder of the package that a file belongs to."""
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else "package"


def banned_names(tree: ast.AST, words: frozenset[str] = BANNED) -> Iterator[str]:
    """Names of functions, classes, arguments, variables and attributes that are one of these words."""
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        if name.strip("_").lower() in words:
            yield name


@functools.cache
def measured() -> dict[str, tuple[int, int, int]]:
    """Room -> lines, uses of `Any`, names that are a banned word."""
    counts = {name: Counter[int]() for name in map(room, FILES)}
    for path in FILES:
        text = path.read_text()
        uses = sum(len(re.findall(r"\bAny\b", line)) for line in text.splitlines() if "import" not in line)
        names = sum(1 for _ in banned_names(ast.parse(text)))
        counts[room(path)].update({0: len(text.splitlines()), 1: uses, 2: names})
    return {name: (count[0], count[1], count[2]) for name, count in counts.items()}


def test_every_room_has_a_budget() -> None:
    assert set(measured()) == set(BUDGETS)


@pytest.mark.parametrize("name", ROOMS)
@pytest.mark.parametrize("measure", [0, 1, 2], ids=["lines", "any", "banned"])
def test_a_room_keeps_to_its_budget(name: str, measure: int) -> None:
    assert measured()[name][measure] <= BUDGETS[name][measure]


@pytest.mark.parametrize("folder", [BENCH, TESTS], ids=["bench", "tests"])
def test_no_name_of_a_bench_or_a_test_is_a_banned_word(folder: Path) -> None:
    files = [(path, ast.parse(path.read_text())) for path in folder.rglob("*.py")]
    assert [(path.name, name) for path, tree in files for name in banned_names(tree, BANNED_BESIDE)] == []


def test_library_and_tools_keep_to_their_budgets() -> None:
    totals = Counter[bool]()
    for name, (count, _, _) in measured().items():
        totals[name in TOOLS] += count
    assert totals[False] <= LIBRARY_LINES
    assert totals[True] <= TOOL_LINES
