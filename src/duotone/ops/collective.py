"""Collectives as ops, over the rows (the first dimension) of the ranks of a process group."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from duotone.comm import all_gather, all_reduce, reduce_scatter
from duotone.ops.basic import BasicOp
from duotone.pipeline.stage import Gradients, Needs, Saved, Stage
from duotone.pipeline.tensor_info import TensorInfo

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Collective = Callable[[Tensor, str], Tensor]


def _sum(x: Tensor, group: str) -> Tensor:
    return all_reduce(x, "sum", group)


def _pass(x: Tensor, group: str) -> Tensor:
    return x


@dataclass(frozen=True, eq=False)
class CollectiveStage(Stage):
    """One collective forward, its adjoint backward."""

    group: str
    collective: Collective
    adjoint: Collective

    def forward(self, x: Tensor) -> tuple[Tensor, Saved]:
        return self.collective(x, self.group), ()

    def backward(self, dy: Tensor, saved: Saved, needs: Needs) -> Gradients:
        return (self.adjoint(dy, self.group),)


class _Collective(BasicOp):
    pair: ClassVar[tuple[Collective, Collective]]

    def __init__(self, process_group: "ProcessGroup") -> None:
        super().__init__()
        self.stage = CollectiveStage(process_group.group_name, *self.pair)

    def link(self, info: TensorInfo, is_first_microbatch: bool | None) -> tuple[Stage, TensorInfo]:
        return self.stage, info._replace(rows=None, quantizer=None)


class AllGather(_Collective):
    """The rows of all ranks; backward sums and scatters."""

    pair = (all_gather, reduce_scatter)


class ReduceScatter(_Collective):
    """This rank's rows of the sum; backward gathers."""

    pair = (reduce_scatter, all_gather)


class AllReduce(_Collective):
    """The sum on every rank; the gradient passes, because every rank has it."""

    pair = (_sum, _pass)
