"""Old public names: each still works, with a DeprecationWarning that names the new one."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    """Tell the caller's caller that `old` has another name now."""
    warnings.warn(f"{old} has been renamed: use {new}", DeprecationWarning, stacklevel=stacklevel)


def old_names(names: Mapping[str, str], module: dict[str, Any]) -> Callable[[str], Any]:
    """The `__getattr__` of a module with these globals, in which old names lead to new ones."""

    def find(name: str) -> Any:
        home = module["__name__"]
        if name not in names:
            raise AttributeError(f"module {home!r} has no attribute {name!r}")
        warn_renamed(f"{home}.{name}", f"{home}.{names[name]}")
        return module[names[name]]

    return find


def old_field(old: str, new: str) -> property:
    """A property that reads the field `new` under its old name."""

    def read(owner: object) -> Any:
        warn_renamed(f"{type(owner).__name__}.{old}", new)
        return getattr(owner, new)

    return property(read, doc=f"The old name of `{new}`.")
