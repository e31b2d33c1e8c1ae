"""The exceptions of Duotone. Every message is one line: the wrong value, the allowed values, and what to do."""

from dataclasses import fields
from typing import Any


class UserError(ValueError):
    """Something the caller gave is not allowed; nothing was changed. The command line prints it and exits with 2."""


class MissingPlaneError(RuntimeError):
    """A plane that an operation needs is absent from a quantized tensor and cannot be derived without loss."""


class RecipeError(UserError):
    """A recipe, a rule or a format name that cannot be used."""


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
