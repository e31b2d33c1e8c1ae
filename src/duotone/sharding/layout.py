"""How a linear is spread over ranks: what is gathered before a product and reduced after it.

Sequence parallelism keeps activations outside of the pair of linears as shards of their rows. Planes travel as codes
and scales. If a scale spans the rows, the ranks agree on it when they encode.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from duotone.comm import ShardContext, all_reduce, group_rank, group_size, reduce_scatter
from duotone.errors import UserError, one_of
from duotone.tensor.plane import Plane, gather
from duotone.tensor.quantizer import Quantizer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


Dims = tuple[int | None, int | None, int | None]
"""A dimension of the matrices of input, weight and gradient: 0 is rows, 1 is columns, None is no dimension."""
Shards = tuple[ShardContext | None, ShardContext | None, ShardContext | None]


@dataclass(frozen=True)
class Layout:
    """A linear that is whole on every rank; also the base of the parallel ones. `group` is a c10d group name."""

    group: str = ""
    sequence_parallel: bool = False
    mode: ClassVar[str | None] = None
    exchanges: ClassVar[bool] = False
    """Whether the methods below do anything."""
    gathers_grad = False
    """Whether `gather_grad` does."""

    @property
    def dims(self) -> Dims:
        """The dimensions that are cut into shards."""
        return None, None, None

    @property
    def shards(self) -> Shards:
        """The matrices on whose scales the ranks agree, of which this rank's input, weight and gradient are shards."""
        first, second, third = (None if dim is None else ShardContext(self.group, dim) for dim in self.dims)
        return first, second, third

    def stream(self, stream: int, shard: ShardContext | None) -> int:
        """The number of the random stream of an operand, of which this rank has a shard, or all of it.

        Each rank draws different numbers for its shard. Errors of equal numbers would not average out in sums.
        """
        return stream if shard is None else stream + group_rank(self.group) * STREAMS

    def gather_input(self, plane: Plane, dim: int) -> Plane:
        """The input of the product from this rank's plane, whose `dim` holds the rows of the activation."""
        return plane

    def gather_grad(self, plane: Plane, dim: int) -> Plane:
        """The gradient of the output from this rank's plane, whose `dim` holds the rows of the activation."""
        return plane

    def bias_in_product(self, bias: Tensor | None) -> Tensor | None:
        """The bias that the product adds. None if `reduce_output` adds it."""
        return bias

    def reduce_output(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """The output of the module, from this rank's product."""
        return y

    def reduce_grad_input(self, dx: Tensor) -> Tensor:
        """The gradient of the input, from this rank's product."""
        return dx

    def reduce_grad_bias(self, db: Tensor) -> Tensor:
        """The gradient of the bias, from that of this rank's rows."""
        return db


@dataclass(frozen=True)
class ColumnParallel(Layout):
    """out_features split over the ranks: y = x w_i^T + b_i.

    With sequence parallelism x is gathered, again in backward, and dx is scattered; else dx is summed over the ranks.
    """

    mode = "column"
    exchanges = True

    @property
    def dims(self) -> Dims:
        return 0 if self.sequence_parallel else None, None, None

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
    def gathers_grad(self) -> bool:  # type: ignore[override]
        return self.sequence_parallel

    @property
    def dims(self) -> Dims:
        return None, None, 0 if self.sequence_parallel else None

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
    """Operands are the local tensors of DTensors, which gather and sum themselves. Only scales are agreed on."""

    exchanges = True
    input_dim: int | None = None
    weight_dim: int | None = None
    grad_dim: int | None = None

    @property
    def dims(self) -> Dims:
        return self.input_dim, self.weight_dim, self.grad_dim

    def bias_in_product(self, bias: Tensor | None) -> Tensor | None:
        """The first rank alone adds the bias if outputs are summed over the ranks."""
        return bias if self.weight_dim != 1 or group_rank(self.group) == 0 else None


@dataclass(frozen=True)
class GatheringShards(Sharded):
    """Rows of the input and out_features are cut: codes of x are gathered, again in backward, and dx is scattered.

    Gathered rows are in the order of the ranks.
    """

    def gather_input(self, plane: Plane, dim: int) -> Plane:
        return gather(plane, dim, self.group, group_size(self.group))

    def reduce_grad_input(self, dx: Tensor) -> Tensor:
        return reduce_scatter(dx, self.group)


@dataclass(frozen=True)
class ScatteringShards(Sharded):
    """in_features are cut: the sum of y is scattered along its rows, and codes of dy are gathered.

    Rows of the input are in the order of the ranks.
    """

    gathers_grad = True

    def gather_grad(self, plane: Plane, dim: int) -> Plane:
        return gather(plane, dim, self.group, group_size(self.group))

    def reduce_output(self, y: Tensor, bias: Tensor | None) -> Tensor:
        return reduce_scatter(y, self.group)

    def reduce_grad_bias(self, db: Tensor) -> Tensor:
        return all_reduce(db, "sum", self.group)


def compared(quantizer: Quantizer) -> list[str]:
    """Return what ranks compare of a quantizer before they communicate: both formats, and the delayed parameters.

    Ranks that scale with other parameters train other models, though their formats are the same.
    """
    formats = [str(fmt and fmt.name) for fmt in (quantizer.rowwise, quantizer.columnwise)]
    return formats if quantizer.history is None else [*formats, repr(quantizer.history)]


STREAMS = 1 << 40
"""The distance from the seeds of one rank to those of the next rank."""

WHOLE = Layout()
LAYOUTS = {None: Layout, "column": ColumnParallel, "row": RowParallel}
"""Classes of layouts by `parallel_mode`."""


def parallel_layout(
    mode: str | None, group: "ProcessGroup | None", sequence_parallel: bool, tp_size: int = 1
) -> Layout:
    """The layout of `parallel_mode` in a process group. A `tp_size` above 1 must be the size of the group."""
    one_of("parallel_mode", mode, LAYOUTS)
    if not isinstance(tp_size, int) or tp_size < 1 or (mode is None and tp_size != 1):
        remedy = "leave it out, or give parallel_mode 'column' or 'row' and the tp_group whose size it repeats"
        raise UserError(f"tp_size is {tp_size!r}; {remedy}")
    if mode is None:
        if sequence_parallel:
            raise UserError("sequence_parallel needs parallel_mode 'column' or 'row'; give one, and its tp_group")
        return WHOLE
    if group is None or not hasattr(group, "group_name"):
        raise UserError(
            f"parallel_mode {mode!r} needs a tp_group, also beside tp_size, and got {group!r}; pass the process group "
            "of the tensor-parallel ranks"
        )
    if tp_size not in (1, group.size()):
        raise UserError(f"tp_size is {tp_size} and tp_group has {group.size()} ranks; leave tp_size out")
    return LAYOUTS[mode](group.group_name, sequence_parallel)


def local_sizes(layout: Layout, in_features: int, out_features: int, group: "ProcessGroup | None") -> tuple[int, int]:
    """What this rank holds of in_features and out_features."""
    size = 1 if group is None else group.size()
    whole = {"column": out_features, "row": in_features}.get(layout.mode or "", size)
    if whole % size:
        raise UserError(f"parallel_mode {layout.mode!r} cannot split {whole} features over {size} ranks")
    local_in = in_features // size if layout.mode == "row" else in_features
    return local_in, out_features // size if layout.mode == "column" else out_features
