"""Ops of torch that a graph calls as one node. Compilers know them by the shapes of their results alone."""

from collections.abc import Callable, Sequence

import torch

STATEFUL = (torch.Tag.nondeterministic_seeded, *filter(None, [getattr(torch.Tag, "cudagraph_unsafe", None)]))
"""Tags of ops that read or change what a graph does not hold. No pass merges them, and no CUDA graph replays them."""

_LIBRARY = torch.library.Library("duotone", "FRAGMENT")


def define_op(
    schema: str,
    kernel: Callable[..., object],
    shapes: Callable[..., object],
    *,
    devices: Sequence[str] = ("CPU", "CUDA"),
    tags: Sequence[torch.Tag] = (),
) -> None:
    """Define `torch.ops.duotone.<schema>`. `shapes` takes the same arguments and gives results without values."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=tags)
    for device in devices:
        _LIBRARY.impl(name, kernel, device)
    torch.library.register_fake(f"duotone::{name}", shapes, lib=_LIBRARY)
