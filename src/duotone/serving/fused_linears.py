"""Linears that servers multiply as one matrix, so that they need one global scale."""

from collections.abc import Iterable

FUSED = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Names of linears of one module, as servers know them."""


def fused_with(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Each of the linears with all that are fused with it, itself included."""
    every = list(names)
    groups: dict[tuple[str, int], list[str]] = {}
    for name in every:
        owner, _, child = name.rpartition(".")
        kind = next((i for i, members in enumerate(FUSED) if child in members), None)
        if kind is not None:
            groups.setdefault((owner, kind), []).append(name)
    fused = {name: tuple(members) for members in groups.values() for name in members}
    return {name: fused.get(name, (name,)) for name in every}
