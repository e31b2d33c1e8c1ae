"""Folders of results: whether they can be written, and locks on them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from duotone.errors import UserError
from duotone_lab.training import outputs


def test_a_path_below_a_file_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write to .*: .*file is not a folder; choose a folder"):
        outputs.require_writable(tmp_path / "file" / "below" / "it")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere: run the tests as another user")
def test_a_read_only_folder_cannot_be_written(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="is read-only"):
        outputs.require_writable(tmp_path / "runs")


def test_a_writable_place_is_checked_without_making_it(tmp_path):
    outputs.require_writable(tmp_path / "a" / "b")
    assert os.listdir(tmp_path) == []
    assert outputs.make_folder(tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("name", ["a" * 256, "loop/below"])
def test_a_name_that_no_folder_can_have_is_told(tmp_path, name):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(
        UserError, match=r"cannot write to .* \((File name too long|Too many levels of symbolic links)\)"
    ):
        outputs.require_writable(tmp_path / name)


HOLDER = """
import sys, time
from pathlib import Path
from duotone_lab.training import outputs
with outputs.locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


def test_a_lock_names_its_holder_and_dies_with_it(tmp_path):
    command = [sys.executable, "-c", HOLDER, tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(UserError, match=rf"is in use by process {holder.pid} on .*: wait until that ends"):
            with outputs.locked(tmp_path):
                pass
        holder.send_signal(signal.SIGKILL)
    assert os.listdir(tmp_path) == [outputs.LOCK]
    with outputs.locked(tmp_path), pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
        with outputs.locked(tmp_path):
            pass
    assert os.listdir(tmp_path) == []


def test_half_of_a_character_is_a_damaged_file(tmp_path: Path) -> None:
    """A command that prints it would end in a traceback."""
    path = tmp_path / "result.json"
    path.write_text('{"recipe": "\\ud800"}')
    with pytest.raises(UserError, match=r"^[^\n]*is no JSON [^\n]*: run again$"):
        outputs.read_json(path, "", "run again")
