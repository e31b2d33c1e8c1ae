"""Collectives on a group that is given by its c10d name: a string can be pickled, hashed and compiled in."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from duotone.errors import UserError


def group_size(group: str) -> int:
    """Ranks of the group. Raises UserError where this process has no group of that name."""
    return _resolve(group).size()


def group_rank(group: str) -> int:
    """This process's rank in the group."""
    return _resolve(group).rank()


def all_reduce(x: Tensor, op: str, group: str) -> Tensor:
    """The elementwise "sum" or "max" over the ranks, as a new tensor."""
    _resolve(group)
    return _wait(torch.ops._c10d_functional.all_reduce(x.contiguous(), op, group))


def all_gather(x: Tensor, group: str) -> Tensor:
    """The ranks' tensors one after the other along dimension 0."""
    return _wait(torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), group_size(group), group))


def reduce_scatter(x: Tensor, group: str) -> Tensor:
    """This rank's piece along dimension 0 of the sum over the ranks. Raises UserError where the pieces are uneven."""
    size = group_size(group)
    if x.shape[0] % size:
        raise UserError(f"{x.shape[0]} rows do not divide over the {size} ranks of group {group!r}; pad the batch")
    return _wait(torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", size, group))


def _wait(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(x)


def _resolve(group: str) -> Any:
    # Never a default group: a value that names a group of another process must not communicate.
    try:
        return dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    except (RuntimeError, ValueError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"process group {group!r} does not exist here ({reason}); pass a group of this process"
        ) from None
