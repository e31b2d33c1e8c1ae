"""The kernels' logic, in Triton's interpreter, has the bits of the plain stages; without a GPU."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed; `make test` brings it on Linux on x86-64")

FEWEST = {"adamw": 300, "attention": 15, "attention_backward": 35, "casts": 200, "census": 10, "norms": 250}
FEWEST |= {"nvfp4": 200, "roll": 150, "rotary": 20, "segments": 400}
"""The checks of each file interpreted_*.py, and how many comparisons these are at least."""


@pytest.fixture(scope="module")
def interpret() -> Iterator[Callable[[str], tuple[int, list[str]]]]:
    """interpret(checks) -> the number of comparisons, and what differs. One process answers for all files."""
    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, str(Path(__file__).with_name("interpreting.py"))]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        with subprocess.Popen(command, text=True, **pipes) as process:

            def ask(checks: str) -> tuple[int, list[str]]:
                print(checks, file=process.stdin, flush=True)
                line = process.stdout.readline()
                errors.seek(0)
                assert line, errors.read()[-3000:]
                return json.loads(line)["comparisons"], json.loads(line)["wrong"]

            yield ask


@pytest.mark.parametrize(
    "checks",
    [
        *(pytest.param(name, marks=[pytest.mark.rest] if name == "segments" else []) for name in FEWEST),
        *(pytest.param(f"{name} all", marks=pytest.mark.slow) for name in FEWEST),
    ],
)
def test_interpreted_kernels_are_right(interpret: Callable[[str], tuple[int, list[str]]], checks: str) -> None:
    comparisons, wrong = interpret(checks)
    assert not wrong
    assert comparisons > FEWEST[checks.split()[0]]


def test_each_file_of_checks_runs() -> None:
    files = {path.stem.removeprefix("interpreted_") for path in Path(__file__).parent.glob("interpreted_*.py")}
    assert files == set(FEWEST)
