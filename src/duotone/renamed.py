"""Old public names: each still works, with a DeprecationWarning that names the new one."""

import pkgutil
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    """Tell the caller's caller that `old` has another name now."""
    warnings.warn(f"{old} has been renamed: use {new}", DeprecationWarning, stacklevel=stacklevel)


def old_names(names: Mapping[str, str], module: dict[str, Any]) -> Callable[[str], Any]:
    """The `__getattr__` of a module with these globals, in which old names lead to new ones of it or to full paths."""

    def find(name: str) -> Any:
        home = module["__name__"]
        if name not in names:
            raise AttributeError(f"module {home!r} has no attribute {name!r}")
        path = names[name] if "." in names[name] else f"{home}.{names[name]}"
        warn_renamed(f"{home}.{name}", path)
        return pkgutil.resolve_name(path)

    return find


def old_field(old: str, new: str) -> property:
    """A property that reads the field `new` under its old name."""

    def read(owner: object) -> Any:
        warn_renamed(f"{type(owner).__name__}.{old}", new)
        return getattr(owner, new)

    return property(read, doc=f"The old name of `{new}`.")
