"""A lock file, for work that only one process may do at a time."""

import contextlib
import fcntl
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from duotone.errors import UserError, path_errors


@contextlib.contextmanager
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
            with contextlib.suppress(FileNotFoundError):  # its last holder removes it, and the next one makes another
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
