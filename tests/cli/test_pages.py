"""The commands on the pages, in blocks and in text: each exists and parses as it is written, and some pages run small.

A small run has a model of one layer, and a fiftieth of the steps and of the context that the page names.
"""

import importlib.util
import json
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from bench import ranks
from duotone_lab.cli import runs
from duotone_lab.cli.main import cli
from duotone_lab.training import presets, texts
from duotone_lab.training.presets import ModelConfig, Preset

ROOT = Path(__file__).parents[2]
PAGES = {
    page.relative_to(ROOT).as_posix(): page.read_text()
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md")))
}
FRAGMENTS = {
    "docs/hugging-face.md": "a plan over two ranks: tests/distributed/entries_worker.py",
    "docs/parallel.md": "context_parallel over two ranks: tests/attention/context_worker.py",
}
"""Pages whose plain blocks are Python that one process cannot run, and what runs it."""

SIZES = ModelConfig(layers=1, dim=32, heads=1, hidden=32, context=16, tied=True)
SMALL = Preset("demo", SIZES, batch=2, steps=2, learning_rate=1e-3, warmup=1, heldout_batches=1)
RUN = {
    "docs/tutorial.md": 5,
    "docs/report.md": 3,
    "docs/many-gpus.md": 1,
    "docs/from-te.md": 2,
    "docs/command-line.md": 19,
    "docs/choosing.md": 3,
}
"""Pages whose commands run, and how many do. The numbers show that none is left out unseen."""

ELSEWHERE = {
    "torchrun": "tests/cli/test_parallel.py",
    "advise": "tests/cli/test_advise.py",
    "bench": "it times a device: tests/cli/test_bench.py",
    "--model": "tests/cli/test_model.py",
    "cuda": "a GPU",
    "pip": "an installation: tests/try_wheel.py",
    "pytest": "a test",
}
"""What these pages leave to other tests, by a word of the command."""


def blocks(text: str) -> list[str]:
    """The plain blocks of a page."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [block for kind, block in fences if not kind]


def commands(text: str) -> list[list[str]]:
    """The words of each command, without comments and variables. A backslash continues a line."""
    lines = "".join(blocks(text)).replace("\\\n", " ").splitlines()
    words = [shlex.split(re.sub(r"^[A-Z_]+=\S+ ", "", line), comments=True) for line in lines]
    return [line for line in words if line]


def cited(text: str) -> list[list[str]]:
    """The words of each `duotone` command between backticks in the text of a page. `N` stands for a number."""
    lines = re.findall(r"`(?:[A-Z]+=\S+ )?(duotone \w[^`\n]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [shlex.split(re.sub(r"\bN\b", "1", line)) for line in dict.fromkeys(lines)]


TYPED = [
    (page, line) for page, text in PAGES.items() for line in ([] if page in FRAGMENTS else commands(text)) + cited(text)
]


@pytest.mark.parametrize(("page", "line"), TYPED, ids=[f"{page}: {shlex.join(line)[:60]}" for page, line in TYPED])
def test_a_command_exists_as_it_is_written(page: str, line: list[str], monkeypatch) -> None:
    """Options and choices of `duotone`; targets, extras, scripts and modules of this repository."""
    program, *words = line
    if program == "torchrun":
        get_args_parser().parse_args(words)
    if program == "torchrun" or line[:2] == ["python", "-m"]:
        at = words.index("-m") if "-m" in words else next(n for n, word in enumerate(words) if word.endswith(".py"))
        program, *words = words[at + 1 :] if words[at] == "-m" else words[at:]
    if program == "duotone":
        group = cli
        if words[0] == "bench" and words[1:]:
            from bench.command import bench as group

            words = words[1:]
        parent = group.make_context("duotone", words, resilient_parsing=True)
        name, command, rest = group.resolve_command(parent, words)
        assert command is not None
        command.make_context(name, rest, parent=parent)  # a command remembers its help option, which the group names
    elif program == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        named = ",".join(part for word in words for part in re.findall(r"\[([\w,-]+)\]", word))
        assert set(filter(None, named.split(","))) <= extras.keys()
    elif program == "pytest" or program.endswith(".py"):
        assert (ROOT / (program if program.endswith(".py") else words[-1])).is_file()
    elif program == "bench.ranks":
        monkeypatch.setattr(sys, "argv", line[line.index(program) :])
        assert ranks.parse().shape == words[words.index("--shape") + 1]
    else:
        assert importlib.util.find_spec(program) is not None


SHRUNK = ("--steps", "--save-every", "--context")


def small(line: list[str]) -> list[str]:
    """A command with a fiftieth of its steps and of its context."""
    pairs = zip(["", *line], line, strict=False)
    return [str(-(-int(word) // 50)) if before in SHRUNK else word for before, word in pairs]


@pytest.mark.parametrize("page", RUN)
def test_the_commands_of_a_page_run_in_a_row(page: str, duotone, tmp_path, monkeypatch) -> None:
    """In a folder with what a reader has: the sources of the clone, a script, and another result."""
    monkeypatch.setitem(presets.PRESETS, "demo", SMALL)
    monkeypatch.setattr(runs, "DEFAULT_RECIPES", ("bf16", "mxfp8"))
    monkeypatch.setattr(texts, "DEFAULT_BYTES", 20_000)
    monkeypatch.chdir(tmp_path)
    for name in ("docs", "src", "."):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "words.md").write_text(" ".join(f"word {n} of a text" for n in range(400)))
    (tmp_path / "train.py").write_text("import transformer_engine.pytorch as te\nlayer = te.Linear(32, 32)\n")
    if page == "docs/report.md":
        assert duotone("compare", "--seeds", 2, "--lr", 2e-3, "--out", "runs/other", "--recipes", "mxfp8")[0] == 0
    lines = [line for line in commands(PAGES[page]) if not ELSEWHERE.keys() & set(line)]
    assert len(lines) == RUN[page]
    if any("search" in line for line in lines):
        pytest.importorskip("scipy", reason="pip install 'scipy>=1.11'")
    for program, *words in map(small, lines):
        code, out, err = duotone(*words)
        assert program == "duotone" and code == 0 and out, f"duotone {shlex.join(words)}: {err}"
        if "--json" in words:
            json.loads(out)


def test_python_that_one_process_cannot_run_parses() -> None:
    for page in FRAGMENTS:
        assert blocks(PAGES[page])
        for block in blocks(PAGES[page]):
            compile(block, page, "exec")


def test_blocks_are_of_kinds_that_a_test_reads() -> None:
    """Python and TOML in tests/test_docs.py, output in the tests of its page, commands here."""
    kinds = {(kind, page) for page, text in PAGES.items() for kind in re.findall(r"^ *```(\w+)", text, re.MULTILINE)}
    assert {kind for kind, _ in kinds} == {"python", "toml", "text"}
    assert {page for kind, page in kinds if kind == "text"} == {"docs/observing.md"}  # tests/observe/test_page.py
