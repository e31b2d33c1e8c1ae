"""A file of JSON lines that several runs add to."""

import fcntl
import io
import os
import stat
from pathlib import Path


def append_lines(path: Path, text: str) -> None:
    """Add `text`, whole lines, to a file, or nothing: where the disk refuses, the file is as it was. Raises OSError."""
    content = text.encode()
    with open(path, "ab+", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            _write_all(file, content)  # a pipe cannot take anything back
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        torn = file.read(1) not in (b"", b"\n")  # a line that a kill cut is not continued
        try:
            _write_all(file, b"\n" + content if torn and content else content)
            os.fsync(file.fileno())
        except BaseException:
            file.truncate(size)
            raise


def _write_all(file: io.FileIO, content: bytes) -> None:
    while content:
        content = content[file.write(content) :]
