"""Process groups by name, the collectives that the library uses, as functions of tensors, and sums of gradients."""

from duotone.comm.collectives import (
    ShardContext,
    agree,
    all_gather,
    all_reduce,
    all_to_all,
    group_rank,
    group_ranks,
    group_size,
    reduce_scatter,
    require_same,
)
from duotone.comm.gradients import SummedOver

__all__ = [
    "ShardContext",
    "SummedOver",
    "agree",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "group_rank",
    "group_ranks",
    "group_size",
    "reduce_scatter",
    "require_same",
]
