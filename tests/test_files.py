"""Files and folders that appear whole or not at all, and leftovers of killed writes."""

import os
import re

import pytest

from duotone import files


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


def test_long_names_have_a_temporary_neighbour(tmp_path):
    files.publish_file(tmp_path / ("ü" * 127), b"new")
    assert os.listdir(tmp_path) == ["ü" * 127]


def test_a_folder_loses_its_name_before_its_content(tmp_path, monkeypatch):
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "a").write_text("whole")

    def killed(path, **_):
        assert not (tmp_path / "step").exists() and (path / "a").read_text() == "whole"
        raise KeyboardInterrupt

    monkeypatch.setattr(files.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        files.remove_folder(tmp_path / "step")
    monkeypatch.undo()
    (tmp_path / ".other.0123").mkdir()
    files.remove_leftovers(tmp_path, re.compile("step"))
    assert os.listdir(tmp_path) == [".other.0123"]


def test_a_folder_moved_aside_by_a_killed_save_gets_its_name_back(tmp_path, monkeypatch):
    with files.publish_folder(tmp_path / "step") as temporary:
        (temporary / "a").write_text("first")
    monkeypatch.setattr(files.shutil, "rmtree", lambda *_, **__: None)
    real = os.rename

    def killed(source, target):
        if target == tmp_path / "step":
            monkeypatch.setattr(files.os, "rename", lambda *_: None)  # nothing runs after a kill
            raise SystemExit
        real(source, target)

    monkeypatch.setattr(files.os, "rename", killed)
    with pytest.raises(SystemExit), files.publish_folder(tmp_path / "step") as temporary:
        (temporary / "a").write_text("second")
    monkeypatch.undo()
    assert not (tmp_path / "step").exists()
    files.remove_leftovers(tmp_path, re.compile("step"))
    assert os.listdir(tmp_path) == ["step"] and (tmp_path / "step" / "a").read_text() == "first"
