"""The command as a user calls it, and a text file that is quick to train on."""

import random
import re

import pytest

from duotone_lab.cli.main import run

PROGRESS = re.compile(r" \(\d+:\d\d\)$", re.M)
"""How a line of progress ends; a busy machine shows some."""


def write_words(folder):
    draw = random.Random(0)
    path = folder / "words.txt"
    path.write_text(" ".join(draw.choice(["plane", "format", "scale", "block"]) for _ in range(2000)))
    return path


@pytest.fixture
def text_file(tmp_path):
    return write_words(tmp_path)


@pytest.fixture(scope="module")
def shared_text_file(tmp_path_factory):
    """For runs that several tests look at; a test that changes the text writes it back."""
    return write_words(tmp_path_factory.mktemp("text"))


@pytest.fixture
def duotone(capsys):
    """`duotone(*arguments)` gives the exit code, stdout and stderr."""

    def call(*arguments):
        code = run([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def refused(duotone):
    """`refused(*arguments)` expects exit code 2 and gives the one line on stderr."""

    def call(*arguments):
        code, out, err = duotone(*arguments)
        assert code == 2 and out == ""
        text = "".join(line for line in err.splitlines(keepends=True) if not PROGRESS.search(line))
        assert text.startswith("duotone: ") and text.endswith("\n") and text.count("\n") == 1
        return text

    return call
