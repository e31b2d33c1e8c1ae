"""Process groups by name, and the collectives that the library uses, as functions of tensors."""

from duotone.comm.collectives import (
    ShardContext,
    all_gather,
    all_reduce,
    all_to_all,
    group_rank,
    group_ranks,
    group_size,
    reduce_scatter,
    require_same,
)

__all__ = [
    "ShardContext",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "group_rank",
    "group_ranks",
    "group_size",
    "reduce_scatter",
    "require_same",
]
