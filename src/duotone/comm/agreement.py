"""Whether all ranks of a group are about to reduce the same: else a reduction pairs what has nothing in common."""

import hashlib
from collections.abc import Sequence

import torch

from duotone.comm.collectives import all_gather, all_reduce, group_rank, group_size
from duotone.errors import UserError

SHOWN = 240
"""Bytes of each rank's names that an error can show."""


def require_same(names: Sequence[str], device: torch.device, group: str) -> None:
    """UserError on every rank of the group unless all ranks come with the same names, in the same order.

    A collective of two numbers on `device`, which the host waits for.
    """
    if group_size(group) == 1:
        return
    digest = int.from_bytes(hashlib.blake2b("\n".join(names).encode(), digest_size=7).digest(), "little")
    extremes = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
    if all_reduce(extremes, "max", group).tolist() == [digest, -digest]:
        return
    text = ", ".join(names).encode()[:SHOWN].ljust(SHOWN)
    shown = all_gather(torch.tensor([list(text)], dtype=torch.uint8, device=device), group).tolist()
    mine = group_rank(group)
    other = next((rank for rank, row in enumerate(shown) if row != shown[mine]), mine)
    ran = [bytes(shown[rank]).decode(errors="replace").strip() for rank in (mine, other)]
    raise UserError(
        f"the ranks of group {group!r} did not record the same amaxes: rank {mine} those of [{ran[0]}], rank {other} "
        f"those of [{ran[1]}]; run the same modules on all its ranks, or set reduce_amax to false"
    )
