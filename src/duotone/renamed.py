"""Old public names: each still works, with a DeprecationWarning that names the new one. And names that import late."""

import importlib
import pkgutil
import warnings
from collections.abc import Collection, Mapping


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    """Tell the caller's caller that `old` has another name now."""
    warnings.warn(f"{old} has been renamed: use {new}", DeprecationWarning, stacklevel=stacklevel)


def keep_old_names(names: Mapping[str, str], module: dict[str, object], late: Collection[str] = ()) -> None:
    """Let old names of the module with these globals lead to new ones of it, or to full paths.

    `late` are modules below it, which are imported when they are first read.
    Type checkers do not see the `__getattr__` that this adds, so that they still refuse misspelled names.
    """
    home = str(module["__name__"])

    def find(name: str) -> object:
        if name in late:
            return importlib.import_module(f"{home}.{name}")
        if name not in names:
            raise AttributeError(f"module {home!r} has no attribute {name!r}")
        path = names[name] if "." in names[name] else f"{home}.{names[name]}"
        warn_renamed(f"{home}.{name}", path)
        return pkgutil.resolve_name(path)

    module["__getattr__"] = find


def old_field(old: str, new: str) -> property:
    """A property that reads the field `new` under its old name."""

    def read(owner: object) -> object:
        warn_renamed(f"{type(owner).__name__}.{old}", new)
        return getattr(owner, new)

    return property(read, doc=f"The old name of `{new}`.")
