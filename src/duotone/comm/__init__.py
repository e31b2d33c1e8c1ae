"""Process groups by name, and the collectives that the library uses, as functions of tensors."""

from duotone.comm.agreement import require_same
from duotone.comm.collectives import all_gather, all_reduce, group_rank, group_size, reduce_scatter
from duotone.comm.shard import ShardContext

__all__ = ["ShardContext", "all_gather", "all_reduce", "group_rank", "group_size", "reduce_scatter", "require_same"]
