"""Process groups by name, and the collectives that the library uses, as functions of tensors."""

from duotone.comm.agreement import require_same as require_same
from duotone.comm.collectives import all_gather as all_gather
from duotone.comm.collectives import all_reduce as all_reduce
from duotone.comm.collectives import group_size as group_size
from duotone.comm.collectives import reduce_scatter as reduce_scatter
from duotone.comm.shard import ShardContext as ShardContext
