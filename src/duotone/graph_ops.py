"""Ops of torch that a graph calls as one node. Compilers only know the shapes of their results."""

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from duotone.errors import UserError

STATEFUL = (torch.Tag.nondeterministic_seeded, *filter(None, [getattr(torch.Tag, "cudagraph_unsafe", None)]))
"""Tags of ops that read or change state outside of the graph. No pass merges them, and no CUDA graph replays them."""

_LIBRARY = torch.library.Library("duotone", "FRAGMENT")
KERNELS: dict[str, Callable[..., object]] = {}
"""What ops without tags run, by "duotone::" and their name."""


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
    KERNELS.update({} if tags else {f"duotone::{name}": kernel})
    torch.library.register_fake(f"duotone::{name}", shapes, lib=_LIBRARY)
    if tags == STATEFUL:
        for key in ("Batched", "FuncTorchBatched"):  # of gradients, of torch.func
            _LIBRARY.impl(name, _refuse_batch, key)


def _refuse_batch(*_: object) -> NoReturn:
    """UserError before a state moves: torch would call the op once for each sample of a batch."""
    raise UserError(
        "compiled code with delayed scales or other states takes no batch of gradients (is_grads_batched=True, "
        "jacobian(vectorize=True)) and no torch.func.vmap; differentiate for one gradient after the other"
    )


def _functional(x: Tensor) -> Tensor:
    torch._sync(x)  # type: ignore[attr-defined]
    return torch._to_functional_tensor(torch._from_functional_tensor(x))  # type: ignore[attr-defined]


define_op("as_of_now(Tensor x) -> Tensor", torch.clone, lambda x: x.new_empty_strided(x.shape, x.stride()))
_LIBRARY.impl("as_of_now", _functional, "Functionalize")
as_of_now = torch.ops.duotone.as_of_now
"""In a trace: x, without writes that follow. A graph without writes, which compilers get, has no node for it.

An autograd.Function saves tensors through it. In eager code autograd sees that saved tensors were written, but not in
a trace.
"""


def _cast_after(x: Tensor, like: Tensor) -> Tensor:
    return x.to(like.dtype, copy=True)


define_op("cast_after(Tensor x, Tensor like) -> Tensor", _cast_after, _cast_after)
cast_after = torch.ops.duotone.cast_after
"""A copy of x in the dtype of `like`. A graph computes it after `like`, and fuses it with nothing."""
