"""Rows of a matrix over the ranks of a group, in pieces that end on blocks. Torch cuts rows anywhere."""

import torch.nn.functional as F
from torch import Tensor

from duotone.comm.collectives import all_to_all, group_rank, group_size


def piece_of(shard: Tensor, rows: int, step: int, group: str) -> Tensor:
    """This rank's piece (A, K) of a matrix (`rows`, K), from its shard, which `torch.chunk` cut.

    A is the same on all ranks and a multiple of `step`. Zeros follow the last row. Ranks exchange rows if shards do not
    end on blocks.
    """
    ranks, rank = group_size(group), group_rank(group)
    cut, size = -(-rows // ranks), -(-rows // (ranks * step)) * step
    if cut != size:
        sent = [_shared(rank * cut, cut, other * size, size, rows) for other in range(ranks)]
        received = [_shared(other * cut, cut, rank * size, size, rows) for other in range(ranks)]
        shard = all_to_all(shard, sent, received, group)
    missing = size - shard.shape[0]
    return F.pad(shard, (0, 0, 0, missing)) if missing else shard


def _shared(first: int, cut: int, other: int, size: int, rows: int) -> int:
    """The rows that two ranges have in common, before the end of the matrix."""
    return max(0, min(first + cut, other + size, rows) - max(first, other))
