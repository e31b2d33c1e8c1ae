"""Folders of results, and the JSON in them."""

import json
import math
import os
import stat
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from duotone import files
from duotone.errors import UserError, path_errors

LOCK = ".lock"
JSON_BYTES = 1 << 28
"""The largest JSON file that is read: a larger one takes gigabytes of memory."""


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
        # Encoded once more, because no terminal shows half of a character.
        return json.loads(json.dumps(json.loads(content), ensure_ascii=False).encode())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON ({error}): {damaged}") from error


def locked(folder: Path) -> AbstractContextManager[None]:
    """Use `folder` alone: UserError if another process does. The lock ends with this process, however it ends."""
    return files.locked(folder / LOCK, folder, "choose another --out")


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
