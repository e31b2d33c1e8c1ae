"""Writing so that a crash leaves either the old file or folder or the new one, never half of one."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from duotone.errors import UserError


def write_synced(path: Path, content: bytes) -> None:
    """Write `content` to `path` and wait until the disk has it."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in `folder`."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish_file(path: Path, content: bytes) -> None:
    """Replace `path` by a file with `content` in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_synced(temporary, content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def publish_folder(folder: Path) -> Iterator[Path]:
    """Give a temporary folder to fill; after the block it takes the name `folder`, on an error it goes away.

    A folder that has the name already is moved aside just before and removed just after.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    try:
        temporary.mkdir()
        yield temporary
        sync_folder(temporary)
        if folder.exists():
            os.rename(folder, aside)
        os.rename(temporary, folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        if aside.exists() and not folder.exists():
            os.rename(aside, folder)
        raise
    if aside.exists():
        shutil.rmtree(aside)


def require_writable(folder: Path) -> None:
    """UserError unless `folder` is, or could be made, a folder that takes new files; creates nothing."""
    existing = folder.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise UserError(f"cannot write to {folder}: {existing} is not a folder; choose a folder that you may write")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"cannot write to {folder}: {existing} is read-only; choose a folder that you may write")


def make_folder(folder: Path) -> Path:
    """Create `folder` where it is absent; UserError where that is impossible."""
    require_writable(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create {folder} ({error.strerror}): choose a folder that you may write") from error
    return folder
