"""Writing such that a crash leaves the old file or folder, or the new one, but never half of it."""

import json
import math
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from duotone.errors import UserError, path_errors
from duotone.serving import file_lock

ASIDE = ".old"
LOCK = ".lock"
LEFTOVER = re.compile(r"\.(.+)\.[0-9a-f]+(\.old)?", re.DOTALL)
JSON_BYTES = 1 << 28
"""The largest JSON file that is read: a larger one takes gigabytes of memory."""
NAME_BYTES = 60
"""How many bytes of a name a temporary name repeats. File systems take 255 bytes; a character has up to four."""


def json_text(value: object, indent: int | None = None) -> str:
    """JSON with null for infinities and NaN, which it lacks: one of them is no reason to lose all other numbers."""
    return json.dumps(_with_finite_numbers(value), indent=indent, allow_nan=False)


def _with_finite_numbers(value: object) -> object:
    if isinstance(value, dict):
        return {key: _with_finite_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_finite_numbers(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path, absent: str, damaged: str) -> object:
    """The value in a JSON file. UserError with the remedy `absent` or `damaged` if the file has none."""
    with path_errors("cannot read", path, absent):
        if not stat.S_ISREG(path.stat().st_mode) or path.stat().st_size > JSON_BYTES:
            raise UserError(f"{path} is no file of at most {JSON_BYTES} bytes: {damaged}")
        content = path.read_bytes()
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON ({error}): {damaged}") from error


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
    temporary = _beside(path)
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
    temporary = _beside(folder)
    aside = temporary.with_name(temporary.name + ASIDE)
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
    shutil.rmtree(aside, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Take its name from `folder` in one step, then remove it: a kill in between leaves a leftover, not half of it."""
    hidden = _beside(folder)
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
        if leftover[2] and not (folder / leftover[1]).exists():
            os.rename(path, folder / leftover[1])
        else:
            shutil.rmtree(path, ignore_errors=True)


def _beside(path: Path) -> Path:
    """A hidden name in the same folder that nothing has; process ids come again after a restart."""
    return path.parent / f".{path.name[:NAME_BYTES]}.{secrets.token_hex(8)}"


def locked(folder: Path) -> AbstractContextManager[None]:
    """Use `folder` alone: UserError if another process does. The lock ends with this process, however it ends."""
    return file_lock.locked(folder / LOCK, folder, "choose another --out")


def require_writable(folder: Path) -> None:
    """UserError unless `folder` is, or could be made, a folder that takes new files; creates nothing."""
    remedy = "choose a folder that you may write"
    with path_errors("cannot write to", folder, remedy):
        for existing in (folder.absolute(), *folder.absolute().parents):
            with suppress(FileNotFoundError, NotADirectoryError):
                existing.stat()
                break
        if not existing.is_dir():
            raise UserError(f"cannot write to {folder}: {existing} is not a folder; {remedy}")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise UserError(f"cannot write to {folder}: {existing} is read-only; {remedy}")


def make_folder(folder: Path) -> Path:
    """Create `folder` where it is absent; UserError if that is impossible."""
    require_writable(folder)
    with path_errors("cannot create", folder, "choose a folder that you may write"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder
