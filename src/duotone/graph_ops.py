"""Ops of torch that a graph calls as one node. Compilers only know the shapes of their results."""

from collections.abc import Callable, Sequence

import torch

STATEFUL = (torch.Tag.nondeterministic_seeded, *filter(None, [getattr(torch.Tag, "cudagraph_unsafe", None)]))
"""Tags of ops that read or change state outside of the graph. No pass merges them, and no CUDA graph replays them."""

_LIBRARY = torch.library.Library("duotone", "FRAGMENT")


def define_op(
    schema: str,
    kernel: Callable[..., object],
    shapes: Callable[..., object] | None = None,
    *,
    devices: Sequence[str] = ("CPU", "CUDA"),
    tags: Sequence[torch.Tag] = (),
) -> None:
    """Define `torch.ops.duotone.<schema>`. `shapes` takes the same arguments and returns results without values.

    Without `shapes` a trace runs the kernel, and holds the ops that it calls.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=tags)
    if shapes is None:
        _LIBRARY.impl(name, kernel, "CompositeImplicitAutograd")
        return
    for device in devices:
        _LIBRARY.impl(name, kernel, device)
    torch.library.register_fake(f"duotone::{name}", shapes, lib=_LIBRARY)
