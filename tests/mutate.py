"""A script: how many of 30 random changes of the library the tests of `make test` notice.

python tests/mutate.py [FIRST [LAST]]     # changes FIRST to LAST of the 30, counted from 1; all by default

It draws three changes in each of ten rooms, always the same ones while the code stays. Each is made in a copy of the
tree. The tests of the room run first, then all others, and the first failure ends them.
"""

import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SEED = 20261128
"""Chosen before the first run, and never again."""

ROOMS = {
    "attention": "attention",
    "conversion": "conversion",
    "dispatch": "dispatch",
    "formats": "formats",
    "linear": "linear",
    "optim": "optim",
    "planned": "modules",
    "recipes": "recipes",
    "state": "state",
    "tensor": "tensor",
}
"""Folders of the library, and where their tests are."""

EACH = 3
LONGEST = 900
"""Seconds after which a change that lets tests hang counts as noticed."""

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}


@dataclass(frozen=True)
class Change:
    """One expression or statement of a file, and what it becomes."""

    path: Path
    node: ast.expr | ast.stmt
    text: str

    def apply(self, root: Path) -> str:
        """Write the changed file below `root`. Returns what was changed, in one line."""
        path = root / self.path.relative_to(ROOT)
        lines = path.read_bytes().splitlines(keepends=True)
        node, (first, last) = self.node, (self.node.lineno - 1, (self.node.end_lineno or 0) - 1)
        assert node.end_col_offset is not None
        before = lines[first][: node.col_offset]
        after = lines[last][node.end_col_offset :]
        old = b"".join(lines[first : last + 1])[node.col_offset :].removesuffix(after).decode()
        lines[first : last + 1] = [before + self.text.encode() + after]
        path.write_bytes(b"".join(lines))
        return f"{self.path.relative_to(ROOT)}:{node.lineno}: {' '.join(old.split())} -> {self.text}"


def changes(path: Path) -> Iterator[Change]:
    """Yield the changes that a file allows: in bodies of functions, but in no text of an error and no annotation."""
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef) and function.name != "__repr__":
            for statement in function.body:
                yield from (Change(path, node, ast.unparse(new)) for node, new in _in(statement))


def _in(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, ast.AST]]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Raise | ast.Assert | ast.JoinedStr | ast.Import):
        return  # inner functions are walked by themselves
    if isinstance(node, ast.expr | ast.stmt):
        yield from ((node, new) for new in _variants(node))
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else (value,):
            if isinstance(child, ast.AST) and field not in ("annotation", "slice"):
                yield from _in(child)


def _variants(node: ast.AST) -> Iterator[ast.AST]:
    if (isinstance(node, ast.Compare) and len(node.ops) == 1) or isinstance(node, ast.BoolOp | ast.BinOp):
        new = copy.deepcopy(node)
        operator = new.ops[0] if isinstance(new, ast.Compare) else new.op
        if (other := SWAPS.get(type(operator))) is not None:
            if isinstance(new, ast.Compare):
                new.ops = [other()]  # type: ignore[list-item]
            else:
                new.op = other()  # type: ignore[assignment]
            yield new
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()


def drawn() -> list[tuple[str, Change]]:
    """The room and the change, of each of the 30."""
    chance = random.Random(SEED)
    result = []
    for room in ROOMS:
        every = [change for path in sorted((ROOT / "src/duotone" / room).rglob("*.py")) for change in changes(path)]
        result += [(room, change) for change in chance.sample(every, EACH)]
    return result


def failure(tree: Path, *arguments: str) -> str:
    """The first test that fails in a copy of the tree, or ''."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    spread = ["-n", "auto", "--maxprocesses", "8", "--dist", "loadfile", "--no-loadscope-reorder"]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    try:
        ended = subprocess.run(
            command + spread, cwd=tree, env=environment, capture_output=True, text=True, timeout=LONGEST, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end in {LONGEST} s"
    if ended.returncode in (0, 5):
        return ""
    lines = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0].split(" - ")[0] if lines else f"exit {ended.returncode}: {ended.stdout[-300:]}"


def main(first: int, last: int) -> None:
    """Try the changes and print a line for each."""
    survived = 0
    for number, (room, change) in list(enumerate(drawn(), 1))[first - 1 : last]:
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder) / "tree"
            shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "build", "dist", "runs"))
            what = change.apply(tree)
            quick = "-m", "not rest and not slow"  # in this order: a path alone would run the rest, too
            found = failure(tree, *quick, f"tests/{ROOMS[room]}") or failure(tree, *quick, "tests")
        survived += not found
        print(f"{number:2} {what}\n   {found or 'SURVIVED'}", flush=True)
    print(f"{last - first + 1 - survived} of {last - first + 1} noticed")


if __name__ == "__main__":
    numbers = [int(each) for each in sys.argv[1:]]
    main(numbers[0] if numbers else 1, numbers[1] if len(numbers) > 1 else EACH * len(ROOMS))
