"""How a linear is spread over ranks: what is gathered before a product and reduced after it.

Sequence parallelism keeps activations outside of the pair of linears as shards of their rows. Planes travel encoded;
formats whose scale spans the rows have agreed on it when they were encoded.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from duotone.comm import ShardContext, all_reduce, group_rank, group_size, reduce_scatter
from duotone.tensor.plane import Plane, gather


@dataclass(frozen=True)
class Layout:
    """A linear that is whole on every rank; also the base of the parallel ones. `group` is a c10d group name."""

    group: str = ""
    sequence_parallel: bool = False
    mode: ClassVar[str | None] = None
    exchanges: ClassVar[bool] = False
    """Whether the methods below do anything."""

    @property
    def input_shard(self) -> ShardContext | None:
        return None

    @property
    def weight_shard(self) -> ShardContext | None:
        return None

    @property
    def grad_shard(self) -> ShardContext | None:
        return None

    def stream(self, stream: int, shard: ShardContext | None) -> int:
        """The random numbers of an operand, of which this rank has a shard or all."""
        return stream

    def gather_input(self, plane: Plane, dim: int) -> Plane:
        """The input of the product from this rank's plane, whose `dim` holds the rows of the activation."""
        return plane

    def gather_grad(self, plane: Plane, dim: int) -> Plane:
        return plane

    def bias_in_product(self, bias: Tensor | None) -> Tensor | None:
        return bias

    def reduce_output(self, y: Tensor, bias: Tensor | None) -> Tensor:
        return y

    def reduce_grad_input(self, dx: Tensor) -> Tensor:
        return dx

    def reduce_grad_bias(self, db: Tensor) -> Tensor:
        return db


@dataclass(frozen=True)
class ColumnParallel(Layout):
    """out_features split over the ranks: y = x w_i^T + b_i.

    With sequence parallelism x is gathered, again in backward, and dx is scattered; else dx is summed over the ranks.
    """

    mode = "column"
    exchanges = True

    @property
    def input_shard(self) -> ShardContext | None:
        return ShardContext(self.group) if self.sequence_parallel else None

    def gather_input(self, plane: Plane, dim: int) -> Plane:
        return gather(plane, dim, self.group, group_size(self.group)) if self.sequence_parallel else plane

    def reduce_grad_input(self, dx: Tensor) -> Tensor:
        return reduce_scatter(dx, self.group) if self.sequence_parallel else all_reduce(dx, "sum", self.group)


@dataclass(frozen=True)
class RowParallel(Layout):
    """in_features split over the ranks: y = sum_i x_i w_i^T + b, the bias once, after the sum.

    With sequence parallelism y is scattered and dy gathered; else y is summed on every rank.
    """

    mode = "row"
    exchanges = True

    @property
    def grad_shard(self) -> ShardContext | None:
        return ShardContext(self.group) if self.sequence_parallel else None

    def gather_grad(self, plane: Plane, dim: int) -> Plane:
        return gather(plane, dim, self.group, group_size(self.group)) if self.sequence_parallel else plane

    def bias_in_product(self, bias: Tensor | None) -> Tensor | None:
        return None

    def reduce_output(self, y: Tensor, bias: Tensor | None) -> Tensor:
        y = reduce_scatter(y, self.group) if self.sequence_parallel else all_reduce(y, "sum", self.group)
        return y if bias is None else y + bias

    def reduce_grad_bias(self, db: Tensor) -> Tensor:
        return all_reduce(db, "sum", self.group) if self.sequence_parallel else db


@dataclass(frozen=True)
class Sharded(Layout):
    """Operands are the local tensors of DTensors, which gather and sum themselves. Only scales are agreed on.

    Each number is the dimension of the matrix that is cut into shards: 0 rows, 1 columns, None if it is whole.
    """

    exchanges = True
    input_dim: int | None = None
    weight_dim: int | None = None
    grad_dim: int | None = None

    @property
    def input_shard(self) -> ShardContext | None:
        return self._shard(self.input_dim)

    @property
    def weight_shard(self) -> ShardContext | None:
        return self._shard(self.weight_dim)

    @property
    def grad_shard(self) -> ShardContext | None:
        return self._shard(self.grad_dim)

    def bias_in_product(self, bias: Tensor | None) -> Tensor | None:
        """On the first rank alone if outputs are summed over the ranks."""
        return bias if self.weight_dim != 1 or group_rank(self.group) == 0 else None

    def stream(self, stream: int, shard: ShardContext | None) -> int:
        """Ranks draw other numbers for their shards: errors of equal numbers would not average out in sums."""
        return stream if shard is None else stream + group_rank(self.group) * STREAMS

    def _shard(self, dim: int | None) -> ShardContext | None:
        return None if dim is None else ShardContext(self.group, dim)


@dataclass(frozen=True)
class GatheringShards(Sharded):
    """Rows of the input are cut and out_features too: codes of x are gathered, again in backward, and dx is scattered.

    Gathered rows are those of one rank after the other.
    """

    def gather_input(self, plane: Plane, dim: int) -> Plane:
        return gather(plane, dim, self.group, group_size(self.group))

    def reduce_grad_input(self, dx: Tensor) -> Tensor:
        return reduce_scatter(dx, self.group)


@dataclass(frozen=True)
class ScatteringShards(Sharded):
    """in_features are cut: the sum of y is scattered along its rows, and codes of dy are gathered.

    Rows of the input are those of one rank after the other.
    """

    def gather_grad(self, plane: Plane, dim: int) -> Plane:
        return gather(plane, dim, self.group, group_size(self.group))

    def reduce_output(self, y: Tensor, bias: Tensor | None) -> Tensor:
        return reduce_scatter(y, self.group)

    def reduce_grad_bias(self, db: Tensor) -> Tensor:
        return all_reduce(db, "sum", self.group)


STREAMS = 1 << 40
"""From the seeds of one rank to those of the next."""

WHOLE = Layout()
LAYOUTS = {None: Layout, "column": ColumnParallel, "row": RowParallel}
"""By `parallel_mode`."""
