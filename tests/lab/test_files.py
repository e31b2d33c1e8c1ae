import os

import pytest

from duotone.errors import UserError
from duotone.lab import files


def test_a_published_file_replaces_the_old_one_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "result.json"
    path.write_bytes(b"old")
    files.publish_file(path, b"new")
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["result.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    path.write_bytes(b"old")
    monkeypatch.setattr(files.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        files.publish_file(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["result.json"]


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(RuntimeError), files.publish_folder(tmp_path / "step") as temporary:
        (temporary / "a").write_text("half")
        assert not (tmp_path / "step").exists()
        raise RuntimeError
    assert os.listdir(tmp_path) == []
    with files.publish_folder(tmp_path / "step") as temporary:
        (temporary / "a").write_text("first")
    with files.publish_folder(tmp_path / "step") as temporary:
        (temporary / "a").write_text("second")
    assert os.listdir(tmp_path) == ["step"] and (tmp_path / "step" / "a").read_text() == "second"


def test_a_failed_replacement_keeps_the_folder_that_was_there(tmp_path, monkeypatch):
    with files.publish_folder(tmp_path / "step") as temporary:
        (temporary / "a").write_text("first")
    real, refused = os.rename, []

    def refuse(source, target):
        if target == tmp_path / "step" and not refused:
            refused.append(source)
            raise OSError(28, "No space left on device")
        real(source, target)

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(files.os, "rename", refuse)
        with files.publish_folder(tmp_path / "step") as temporary:
            (temporary / "a").write_text("second")
    assert os.listdir(tmp_path) == ["step"] and (tmp_path / "step" / "a").read_text() == "first"


def test_a_path_below_a_file_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write to .*: .*file is not a folder; choose a folder"):
        files.require_writable(tmp_path / "file" / "below" / "it")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere: run the tests as another user")
def test_a_read_only_folder_cannot_be_written(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="is read-only"):
        files.require_writable(tmp_path / "runs")


def test_a_writable_place_is_checked_without_making_it(tmp_path):
    files.require_writable(tmp_path / "a" / "b")
    assert os.listdir(tmp_path) == []
    assert files.make_folder(tmp_path / "a" / "b").is_dir()
