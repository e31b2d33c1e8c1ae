"""The command as a user calls it, and a text file that is quick to train on."""

import random

import pytest

from duotone.cli.main import run


@pytest.fixture
def text_file(tmp_path):
    draw = random.Random(0)
    path = tmp_path / "words.txt"
    path.write_text(" ".join(draw.choice(["plane", "format", "scale", "block"]) for _ in range(2000)))
    return path


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
        assert err.startswith("duotone: ") and err.endswith("\n") and err.count("\n") == 1
        return err

    return call
