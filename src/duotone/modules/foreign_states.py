"""States of delayed scaling that another library wrote into a checkpoint. `compat` knows how to read them."""

from collections.abc import Callable, Sequence
from typing import Any

READERS: list[Callable[[dict[str, Any], str, Sequence[str], bool], None]] = []
"""Each replaces the entries that it knows by those of Duotone.

It takes a checkpoint, the prefix of a module, the prefixes of its linears below that, and whether it is attention.
"""


def translate(state_dict: dict[str, Any], prefix: str, linears: Sequence[str] = ("",), attends: bool = False) -> None:
    """Replace what other libraries wrote into a checkpoint for a module. UserError if it does not fit the module."""
    for read in READERS:
        read(state_dict, prefix, linears, attends)
