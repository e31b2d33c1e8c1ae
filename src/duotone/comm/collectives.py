"""Collectives on a group by its c10d name, and shards: a string can be pickled, hashed and compiled in."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from duotone.capture import is_capturing
from duotone.errors import UserError
from duotone.numbered import constant_in_traces


@constant_in_traces
def group_size(group: str) -> int:
    """Ranks of the group. Raises UserError if this process has no group of that name."""
    return _resolve(group).size()


@constant_in_traces
def group_rank(group: str) -> int:
    """This process's rank in the group."""
    return _resolve(group).rank()


def group_ranks(group: str) -> set[int]:
    """The ranks of the group, as numbers of the whole program."""
    return set(dist.get_process_group_ranks(_resolve(group)))


def all_reduce(x: Tensor, op: str, group: str) -> Tensor:
    """The elementwise "sum" or "max" over the ranks, as a new tensor.

    What lies on the CPU travels through a device of the group, if that is NCCL's. Raises UserError like `all_gather`.
    """
    device = x.device
    if x.dim() > 1:
        _require_same_rows(x, group)
    if not torch.compiler.is_dynamo_compiling():
        types = _resolve(group)._device_types
        x = x.to(types[0]) if x.is_cpu and device not in types else x
    return _wait(torch.ops._c10d_functional.all_reduce(x.contiguous(), op, group)).to(device)


def all_gather(x: Tensor, group: str) -> Tensor:
    """The ranks' tensors one after the other along dimension 0. UserError on all ranks of a CPU if these are uneven."""
    _require_same_rows(x, group)
    return _gathered(x, group)


def _gathered(x: Tensor, group: str) -> Tensor:
    return _wait(torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), group_size(group), group))


def reduce_scatter(x: Tensor, group: str) -> Tensor:
    """This rank's piece along dimension 0 of the sum over the ranks.

    Raises UserError if the pieces are uneven, and like `all_gather`.
    """
    _require_same_rows(x, group)
    size = group_size(group)
    if x.shape[0] % size:
        raise UserError(f"{x.shape[0]} rows do not divide over the {size} ranks of group {group!r}; pad the batch")
    return _wait(torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", size, group))


def all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> Tensor:
    """`sent[i]` rows of `x`, in order, go to rank i, and `received[i]` come from it: (sum received, *rest)."""
    if not torch.compiler.is_dynamo_compiling():
        _resolve(group)
    counts = list(received), list(sent)
    return _wait(torch.ops._c10d_functional.all_to_all_single(x.contiguous(), *counts, group))


COMPARED: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()
"""The numbers of rows that the ranks of a process group on GPUs have compared."""


def _require_same_rows(x: Tensor, group: str) -> None:
    """Raise UserError on every rank of the group, with the rows of each, unless all bring as many rows.

    This is the only place that compares them. On CPUs it does so in each eager call. On GPUs the host would wait for
    the device, so it does so when a number of rows comes for the first time. Ranks whose numbers were equal until then
    compare together, or torch's collectives end in errors of their own, as they do in graphs.
    """
    if type(x) is not Tensor or torch.compiler.is_dynamo_compiling():
        return
    ranks, count = _resolve(group), x.shape[0]
    compared = set[int]() if x.is_cpu else COMPARED.setdefault(ranks, set())
    if torch.device(x.device.type) not in ranks._device_types or count in compared or is_capturing():
        return
    with _disable_current_modes():  # no part of a graph, and no traffic
        rows = _gathered(torch.tensor([count], device=x.device), group).tolist()
    other = next((rank for rank, each in enumerate(rows) if each != rows[0]), None)
    if other is not None:
        text = f"rank 0 has {rows[0]} rows where rank {other} has {rows[other]}"
        raise UserError(f"the ranks of group {group!r} bring uneven rows: {text}; give all as many, or pad the batch")
    compared.add(count)


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


AGREED: set[tuple[str, int]] = set()
"""The names that the ranks of a group agreed on, as digests: a capture cannot compare."""


AMAXES = "did not record the same amaxes", "run the same modules on all its ranks, or set reduce_amax to false"


def require_same(names: Sequence[str], device: torch.device, group: str, problem: tuple[str, str] = AMAXES) -> None:
    """UserError on every rank of the group unless all ranks pass the same names, in the same order.

    `problem` is the text of the error: what the ranks did, and what to do.

    It takes one collective of two numbers on `device`, and the host waits for it.
    """
    if group_size(group) == 1:
        return
    digest = int.from_bytes(hashlib.blake2b("\n".join(names).encode(), digest_size=7).digest(), "little")
    if is_capturing():
        if (group, digest) in AGREED:
            return
        raise UserError(
            f"a CUDA graph captures a reduction over group {group!r} before its ranks have compared what they reduce; "
            "run a step before the capture"
        )
    extremes = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
    if all_reduce(extremes, "max", group).tolist() == [digest, -digest]:
        AGREED.add((group, digest))
        return
    differ, remedy = problem
    raise UserError(f"the ranks of group {group!r} {differ}: {_first_difference(names, device, group)}; {remedy}")


def _first_difference(names: Sequence[str], device: torch.device, group: str) -> str:
    """Where the names of this rank first differ from those of another, in words. All ranks call it."""
    text, rank = "\n".join(names).encode(), group_rank(group)
    sizes = all_gather(torch.tensor([len(text)], dtype=torch.int64, device=device), group).tolist()
    padded = torch.tensor([list(text.ljust(max(sizes)))], dtype=torch.uint8, device=device)
    rows = all_gather(padded, group).tolist()
    shown = [bytes(row[:size]).decode().split("\n") for row, size in zip(rows, sizes, strict=True)]
    other = next(at for at, lines in enumerate(shown) if lines != shown[rank])
    pairs = zip_longest(shown[rank], shown[other], fillvalue="nothing more")
    here, there = next(pair for pair in pairs if pair[0] != pair[1])
    return f"first, rank {rank} has {here or 'nothing'} where rank {other} has {there or 'nothing'}"


@dataclass(frozen=True)
class ShardContext:
    """This rank holds one piece of a matrix along `dim` (0 rows, 1 columns). Other ranks of `group` hold the others.

    It is an argument of a quantize, never part of a quantizer. Formats decide what has to agree: a scale that spans the
    sharded dimension reduces its amax, aligned blocks reduce nothing.
    """

    group: str
    dim: int = 0

    def max(self, amax: Tensor) -> Tensor:
        """The maximum over the ranks; a rank without elements contributes 0."""
        return all_reduce(amax, "max", self.group)

    def agree(self, amaxes: Sequence[Tensor | None], spans: Sequence[bool]) -> tuple[Tensor | None, Tensor | None]:
        """The amaxes of both planes. Those that span the shards become the largest of all, in one collective."""
        asked = [amax for amax, is_shared in zip(amaxes, spans, strict=True) if is_shared and amax is not None]
        if len(asked) < 2:
            answers = [self.max(amax) for amax in asked]
        else:
            parts = torch.split(self.max(torch.cat([amax.reshape(-1) for amax in asked])), [a.numel() for a in asked])
            answers = [part.clone().view(amax.shape) for part, amax in zip(parts, asked, strict=True)]  # aligned
        of_planes = iter(answers)
        row, col = (
            next(of_planes) if is_shared and amax is not None else amax
            for amax, is_shared in zip(amaxes, spans, strict=True)
        )
        return row, col


ALIGNED = 4
"""Kernels want the address of an amax to be a multiple of this many fp32."""


def agree(groups: Sequence[str], amaxes: Sequence[Tensor]) -> list[Tensor]:
    """The maximum of each fp32 amax over the ranks of its group: one collective for each group."""
    agreed: list[Tensor] = list(amaxes)
    for group in dict.fromkeys(groups):
        indices = [at for at, name in enumerate(groups) if name == group]
        sizes = [-(-amaxes[at].numel() // ALIGNED) * ALIGNED for at in indices]
        flat = amaxes[indices[0]].new_zeros(sum(sizes))
        places = [place[: amaxes[at].numel()] for at, place in zip(indices, torch.split(flat, sizes), strict=True)]
        torch._foreach_copy_(places, [amaxes[at].reshape(-1) for at in indices])  # type: ignore
        for at, place in zip(indices, torch.split(ShardContext(group).max(flat), sizes), strict=True):
            agreed[at] = place[: amaxes[at].numel()]
    return agreed
