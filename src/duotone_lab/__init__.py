"""Tools for Duotone: the command line, small models to compare recipes with, the report, and the memory ledger."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duotone_lab.memory.memory_ledger import Ledger, ledger

__all__ = ["Ledger", "ledger"]


def __getattr__(name: str) -> object:
    """Import the ledger when it is first read: `duotone --help` needs no torch."""
    if name in __all__:
        from duotone_lab.memory import memory_ledger

        return getattr(memory_ledger, name)
    raise AttributeError(f"module 'duotone_lab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
