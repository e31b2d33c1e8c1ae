"""Files and folders that a crash leaves whole, as they were or as they become, and locks between processes."""

import fcntl
import os
import platform
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from duotone.errors import UserError, path_errors

PARTIAL, BEFORE = ".partial", ".before"
"""Ends of the hidden names of a folder that is being written or removed, and of the one whose place it takes."""

LEFTOVER = re.compile(r"\.(.+)(\.partial|\.before)", re.DOTALL)
NAME_BYTES = 60
"""How many bytes of a name a temporary name repeats. File systems take 255 bytes; a character has up to four."""


def write_synced(path: Path, content: bytes) -> None:
    """Write `content` to `path` and wait until the disk has it."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in `folder`."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish_file(path: Path, content: bytes) -> None:
    """Replace `path` by a file with `content` in one step. Needs no lock."""
    temporary = path.parent / f".{path.name[:NAME_BYTES]}.{secrets.token_hex(8)}"
    try:
        write_synced(temporary, content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


@contextmanager
def publish_folder(folder: Path) -> Iterator[Path]:
    """Give a hidden folder to fill, which takes the place of `folder` after the block. The caller holds a lock.

    An error in the block leaves `folder` as it was. After a kill the next call puts `folder` back, and gives what the
    killed one had written. UserError if the hidden name is that of a file or a link.
    """
    fresh, before = _hidden(folder, PARTIAL), _hidden(folder, BEFORE)
    if fresh.is_symlink() or (fresh.exists() and not fresh.is_dir()):
        raise UserError(f"{folder} is first written to {fresh}, which is a file or a link; move that away")
    _put_back(before, folder)
    fresh.mkdir(exist_ok=True)
    try:
        yield fresh
        _sync_folder(fresh)
        if folder.exists():
            os.rename(folder, before)
        os.rename(fresh, folder)
        _sync_folder(folder.parent)
    except Exception:
        shutil.rmtree(fresh, ignore_errors=True)
        _put_back(before, folder)
        raise
    shutil.rmtree(before, ignore_errors=True)


def moved_aside(folder: Path) -> Path | None:
    """Return where an absent `folder` is whose replacement was killed, or None."""
    before = _hidden(folder, BEFORE)
    return before if before.exists() else None


def remove_folder(folder: Path) -> None:
    """Take its name from `folder` in one step, then remove it: a kill in between leaves a leftover, not half of it."""
    hidden = _hidden(folder, PARTIAL)
    if hidden.exists():  # left by a killed call
        shutil.rmtree(hidden)
    os.rename(folder, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def remove_leftovers(folder: Path, names: re.Pattern[str]) -> None:
    """Remove what killed calls of `publish_folder` and `remove_folder` left of `names` in `folder`, which is locked.

    A folder that was moved aside for one that never came gets its name back.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        leftover = LEFTOVER.fullmatch(path.name)
        if leftover is None or not names.fullmatch(leftover[1]):
            continue
        if leftover[2] == BEFORE:
            _put_back(path, folder / leftover[1])
        else:
            shutil.rmtree(path, ignore_errors=True)


def _hidden(folder: Path, end: str) -> Path:
    return folder.with_name(f".{folder.name}{end}")


def _put_back(before: Path, folder: Path) -> None:
    """Give a folder that was moved aside its name back, or remove it if another one has the name."""
    if before.exists() and not folder.exists():
        os.rename(before, folder)
    shutil.rmtree(before, ignore_errors=True)


@contextmanager
def locked(path: Path, subject: Path, remedy: str) -> Iterator[None]:
    """Hold the lock file at `path` while the block uses `subject`. UserError if another process holds it.

    The lock ends with this process, however it ends.
    """
    with path_errors("cannot lock", subject, "choose a folder that you may write"):
        try:
            descriptor = _open_locked(path)
        except BlockingIOError:
            raise UserError(f"{subject} is in use by {_holder(path)}: wait until that ends, or {remedy}") from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _open_locked(path: Path) -> int:
    """A descriptor of the lock file at `path`, locked. The file names this process."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):  # its last holder removes it, and the next one makes another
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, f"process {os.getpid()} on {platform.node()}".encode())
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _holder(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[:200] or "another process"
    except OSError:  # it ended just now
        return "another process"
