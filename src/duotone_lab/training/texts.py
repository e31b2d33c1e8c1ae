"""Where the bytes of a corpus come from: files, folders and globs, or the text that every Python ships."""

import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from duotone.errors import UserError, path_errors

DEFAULT_BYTES = 8_000_000
"""The most that the default text takes, so that a demonstration starts at once."""

DEFAULT_SOURCE = "the Python documentation and standard library"
NOT_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


def read(paths: Sequence[str]) -> list[bytes]:
    """The texts of all paths in the order given; files of folders that are no text are left out.

    UserError: a path that does not exist or cannot be read, a named file that is empty or binary, a folder
    without text.
    """
    texts: list[bytes] = []
    for name in paths:
        if os.path.isdir(name):
            usable = [text for text in map(_bytes, files(Path(name))) if text and b"\0" not in text]
            if not usable:
                raise UserError(f"the folder {name} holds no text file: give text files, folders of them or globs")
            texts += usable
        else:
            texts += [_text(file) for file in _matches(name)]
    return texts


def require(paths: Sequence[str]) -> None:
    """UserError if one of `paths` is neither a file nor a folder and matches no file; reads nothing."""
    for name in paths:
        if not os.path.isdir(name):
            _matches(name)


def files(folder: Path, left_out: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Regular files below `folder` in a fixed order, without hidden ones and the folders `left_out`."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in left_out and not name.startswith("."))
        for name in sorted(names):
            path = Path(parent, name)
            if not name.startswith(".") and path.is_file():
                yield path


def python_texts() -> list[bytes]:
    """The topics of Python's documentation, then the standard library's source, up to DEFAULT_BYTES."""
    from pydoc_data.topics import topics

    texts = ["\n".join(topics[name] for name in sorted(topics)).encode()]
    total = len(texts[0])
    for path in files(Path(sysconfig.get_paths()["stdlib"]), NOT_LIBRARY):
        if path.suffix != ".py" or not (text := path.read_bytes()):
            continue
        if total + len(text) > DEFAULT_BYTES:
            break
        texts.append(text)
        total += len(text)
    return texts


def _matches(name: str) -> list[Path]:
    """The file called `name`, or the files that match it as a glob, by name."""
    matches = [name] if os.path.exists(name) else sorted(glob.glob(name, recursive=True))
    paths = [Path(match) for match in matches if not os.path.isdir(match)]
    if not paths:
        raise UserError(f"no data file matches {name}: give an existing text file, a folder or a glob")
    return paths


def _text(path: Path) -> bytes:
    if not path.is_file():
        raise UserError(f"the data file {path} is not a regular file: give a text file, a folder or a glob")
    text = _bytes(path)
    if not text:
        raise UserError(f"the data file {path} is empty: give a file with text")
    if b"\0" in text:
        raise UserError(f"the data file {path} is binary (it holds zero bytes): give a file with text")
    return text


def _bytes(path: Path) -> bytes:
    with path_errors("cannot read the data file", path, "give a readable text file"):
        return path.read_bytes()
