"""Paths that the system refuses are one line, from every function and command that takes a path."""

import copy
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import duotone
from duotone import observe
from duotone.errors import path_errors
from duotone_lab.cli import main


def refused_paths(folder: Path) -> dict[str, Path]:
    """Paths that hold no file and never can, by what is wrong."""
    (folder / "file").write_text("x")
    (folder / "loop").symlink_to(folder / "loop")
    return {
        "5,000 characters": folder / ("z" * 5000),
        "a name of 300 bytes": folder / ("é" * 150),
        "many long folders": folder.joinpath(*["d" * 200] * 30),
        "NUL": folder / "a\0b",
        "a lone surrogate": folder / "a\ud800b",
        "through a file": folder / "file" / "x",
        "through a link to itself": folder / "loop" / "x",
        "a folder that cannot be made": Path("/proc/nothing/x"),
    }


REFUSED = [
    "5,000 characters", "a name of 300 bytes", "many long folders", "NUL", "a lone surrogate", "through a file",
    "through a link to itself", "a folder that cannot be made",
]  # fmt: skip
IN_COMMANDS = [name for name in REFUSED if name not in ("NUL", "a lone surrogate")]
"""No shell can give the others to a command."""


def model():
    return duotone.convert(nn.Sequential(nn.Linear(64, 64)), "mxfp8", rules=())


def monitor(path, **options):
    trained = model()
    with observe.Monitor(trained, path, every=1, **options) as watching:
        trained(torch.randn(32, 64)).sum().backward()
        watching.step()


FUNCTIONS = {
    "export": lambda path: duotone.export(model(), path, dtype=torch.float32),
    "export as text": lambda path: duotone.export(model(), str(path), dtype=torch.float32),
    "load": duotone.load,
    "load into a model": lambda path: duotone.load(path, model()),
    "Monitor": monitor,
    "Monitor with TensorBoard": lambda path: monitor(path, to="tensorboard"),
    "recipes.load": lambda path: duotone.recipes.load(f"{path}.toml"),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kind", REFUSED)
def test_a_path_that_the_system_refuses_is_one_line(function: str, kind: str, tmp_path) -> None:
    if "TensorBoard" in function:
        pytest.importorskip("tensorboard")
    with pytest.raises(duotone.UserError) as raised:
        FUNCTIONS[function](refused_paths(tmp_path)[kind])
    assert str(raised.value).isprintable()
    if "TensorBoard" not in function:  # it writes a file of its own into the folder
        assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no file that is a full disk")
def test_a_monitor_on_a_full_disk_is_one_line() -> None:
    with pytest.raises(duotone.UserError, match=r"^a monitor cannot write /dev/full \(No space left.*\): make room"):
        monitor("/dev/full")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_folder_without_permission_is_one_line(function: str, tmp_path) -> None:
    (tmp_path / "closed").mkdir(mode=0o000)
    with pytest.raises(duotone.UserError) as raised:
        FUNCTIONS[function](tmp_path / "closed" / "x")
    assert str(raised.value).isprintable()


COMMANDS = [
    "train --preset tiny --steps 1 --out PATH",
    "train --resume --out PATH",
    "train --preset tiny --steps 1 --data PATH",
    "train --preset tiny --steps 1 --recipe PATH.toml",
    "train --preset tiny --steps 1 --model hf:PATH",
    "compare --preset tiny --steps 1 --recipes bf16 --out PATH",
    "compare --resume --out PATH",
    "compare --preset tiny --recipes PATH.toml",
    "search --preset tiny --budget speed=1.1 --out PATH",
    "search --resume --out PATH",
    "advise --preset tiny --out PATH",
    "advise --preset tiny --recipes PATH.toml",
    "plan --preset tiny --recipe PATH.toml",
    "plan --preset tiny --model hf:PATH",
    "migrate PATH",
    "report PATH",
    "report RUN --out PATH",
    "report RUN PATH",
    "export PATH",
    "export RUN --out PATH",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "text").write_text("planes and formats " * 500)
    options = ["--preset", "tiny", "--steps", "1", "--data", str(folder / "text"), "--out", str(folder / "run")]
    assert main.run(["train", *options]) == 0
    return folder / "run"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", IN_COMMANDS)
def test_a_command_with_a_path_that_the_system_refuses_ends_with_2(
    command: str, kind: str, run: Path, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    path = str(refused_paths(tmp_path)[kind])
    words = [word.replace("PATH", path).replace("RUN", str(run)) for word in command.split()]
    assert main.run(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("duotone: ") and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_page_in_place_of_a_folder_is_one_line(run: Path, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (".", "/", str(tmp_path)):
        assert main.run(["report", str(run), "--out", path, "--force"]) == 2
        assert "cannot write the report" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no file that is a full disk")
def test_a_full_disk_behind_the_output_of_a_command_is_no_traceback() -> None:
    with open("/dev/full", "w") as full:
        line = [sys.executable, "-m", "duotone", "formats"]
        ended = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode and "Traceback" not in ended.stderr and "No space left" in ended.stderr


def test_a_message_shows_so_much_of_a_path_as_one_reads() -> None:
    with pytest.raises(duotone.UserError) as raised, path_errors("cannot read", "a/" * 5000, "give another"):
        raise OSError(36, "File name too long")
    text = str(raised.value)
    assert text.startswith("cannot read a/a/a/") and text.endswith("a/ (File name too long): give another")
    assert len(text) < 500


def test_other_errors_pass() -> None:
    for error in (KeyError("x"), ValueError("x"), duotone.UserError("x"), RuntimeError("x")):
        with pytest.raises(type(error), match="x") as raised, path_errors("cannot read", "x", "give another"):
            raise copy.copy(error)
        assert type(raised.value) is type(error)
    with warnings.catch_warnings(), path_errors("cannot read", "x", "give another"):
        pass
