"""The exceptions of Duotone. Every message is one line: the wrong value, the allowed values, and what to do."""

import errno
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

SHOWN = 200
"""The characters of a long path that a message shows at each end."""


class UserError(ValueError):
    """Something the caller gave is not allowed; nothing was changed. The command line prints it and exits with 2."""


class MissingPlaneError(RuntimeError):
    """A plane that an operation needs is absent from a quantized tensor and cannot be derived without loss."""


class RecipeError(UserError):
    """A recipe, a rule or a format name that cannot be used."""


def one_of(field: str, value: object, allowed: Collection[object], error: type[UserError] = UserError) -> None:
    """Raise `error` unless `value` is allowed. The message names the field, the value, and all that is allowed."""
    if value not in allowed:
        raise error(f"{field} {value!r} is unknown; allowed are {', '.join(map(repr, allowed))}")


def require_integers(least: int, error: type[UserError] = UserError, **values: object) -> None:
    """Raise `error` unless each value, by its name in the message, is an int of at least `least`."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise error(f"{name} is {value!r}; give an integer of at least {least}")


@contextmanager
def path_errors(doing: str, path: str | Path | None, remedy: str) -> Iterator[None]:
    """Turn what the system refuses about a path inside of the block into a UserError of one line.

    This is the only place that knows how a path is refused: a name that is too long, a place without permission, a full
    disk, and characters that no path can hold (NUL, a lone surrogate). The message is "`doing` `path` (why): `remedy`",
    where None stands for the path that the system names.
    """
    try:
        if not _is_possible(path or ""):
            raise OSError(errno.EINVAL, "it holds a character that no path can hold")
        yield
    except OSError as error:
        name = str(path or error.filename or "a file")
        name = name if len(name) <= 2 * SHOWN else f"{name[:SHOWN]}...{name[-SHOWN:]}"
        name = name if name.isprintable() else repr(name)
        raise UserError(f"{doing} {name} ({error.strerror or error}): {remedy}") from error


def _is_possible(path: str | Path) -> bool:
    """Whether a path can be given to the system, which takes bytes without NUL."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


def qualified_name(value: object) -> str:
    """A function, or an object that is called like one, as "module.name"."""
    return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def shown(value: object) -> str:
    """`repr` for messages and other `repr`s. A function, which has an address there, is shown by its name."""
    text = repr(value)
    return qualified_name(value) if " at 0x" in text else text


def shown_fields(value: Any) -> str:
    """A dataclass as a call of its class with the fields that differ from their defaults."""
    values = {f: getattr(value, f.name) for f in fields(value) if f.repr}
    options = ", ".join(f"{f.name}={shown(v)}" for f, v in values.items() if v != f.default)
    return f"{type(value).__name__}({options})"
