"""`install()`: scripts that import `transformer_engine` get Duotone.

Each module of Transformer Engine is a table of names, which are resolved when a script asks for them.
"""

import importlib.metadata
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from duotone.compat.transformer_engine.environment import refuse_variables
from duotone.compat.transformer_engine.instead import INSTEAD, MODULES_WITHOUT
from duotone.compat.transformer_engine.names import MODULES, VERSION
from duotone.errors import UserError

__all__ = ["install"]

ROOT = "transformer_engine"


class Without(type):
    """The class of names without a counterpart. They can be imported and subclassed."""

    line: str

    def __call__(cls, *_: object, **__: object) -> None:
        raise UserError(cls.line)

    def __getitem__(cls, _: object) -> None:
        raise UserError(cls.line)

    def __getattr__(cls, name: str) -> None:
        raise AttributeError(cls.line)


def stand_in(name: str, remedy: str) -> Without:
    """What a script imports under this full name."""
    line = f"{name} has no counterpart in Duotone; {remedy}"
    return Without(name.rpartition(".")[2], (), {"__module__": __name__, "__doc__": line, "line": line})


class Names(ModuleType):
    """A module of Transformer Engine."""

    def __getattr__(self, name: str) -> object:
        names, inner = MODULES[self.__name__], f"{self.__name__}.{name}"
        if name == "__all__":
            return sorted(names)
        if inner in MODULES:
            return import_module(inner)
        if name in names:
            return pkgutil.resolve_name(names[name])
        remedy = MODULES_WITHOUT.get(self.__name__) or (INSTEAD.get(name) if names else None)
        if remedy and not name.startswith("_"):
            return self.__dict__.setdefault(name, stand_in(inner, remedy))
        remedy = "duotone migrate SCRIPT lists what a script uses and what to write instead"
        raise AttributeError(f"Duotone has no counterpart of {inner}; {remedy}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *MODULES[self.__name__]})


class Distribution(importlib.metadata.Distribution):
    """The metadata for packages that ask for the version of transformer-engine."""

    def read_text(self, filename: str) -> str | None:
        """The metadata as a file of text. None for every other file."""
        return (
            f"Metadata-Version: 2.1\nName: transformer-engine\nVersion: {VERSION}\n" if filename == "METADATA" else None
        )

    def locate_file(self, path: object) -> Path:
        """This file: the distribution has none on disk."""
        return Path(__file__)


class Finder(MetaPathFinder, Loader):
    """Finds the modules of Transformer Engine before any that is installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module of Transformer Engine, else None. ModuleNotFoundError if Duotone has no counterpart."""
        if fullname in MODULES:
            return ModuleSpec(fullname, self, origin=__name__, is_package=True)
        if fullname.startswith(f"{ROOT}."):
            message = f"Duotone has no counterpart of {fullname}; docs/from-te.md lists the modules that it has"
            raise ModuleNotFoundError(message, name=fullname)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module, which looks up its names in Duotone's counterpart."""
        return Names(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its version and file."""
        module.__version__ = VERSION  # type: ignore[attr-defined]
        module.__file__ = __file__  # Python's "cannot import name" names it

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        """The distribution, for `importlib.metadata`."""
        name = getattr(context, "name", None)
        if name is not None and name.lower().replace("-", "_") == ROOT:
            yield Distribution()


FINDER = Finder()


def install() -> None:
    """Let `import transformer_engine`, its PyTorch modules and its recipes resolve to Duotone in this process.

    Names, defaults and numerics are those of Transformer Engine. A name without a counterpart is a UserError that says
    what to write instead. Call `install` before anything imports or looks for `transformer_engine`. It may be called
    again. UserError if the real package is imported already, or if an environment variable of Transformer Engine asks
    for numbers that Duotone has no counterpart of.
    """
    refuse_variables()
    imported = sys.modules.get(ROOT)
    if imported is not None and not isinstance(imported, Names):
        raise UserError(
            f"{ROOT} {getattr(imported, '__version__', '')} is imported already; call duotone.compat.te.install() first"
        )
    if FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)
