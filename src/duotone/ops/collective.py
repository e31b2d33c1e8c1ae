"""Collectives as ops, over the rows (the first dimension) of the ranks of a process group."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from duotone.comm import all_gather, all_reduce, reduce_scatter
from duotone.linear.stage import Kept, Stage
from duotone.ops.basic import BasicOp
from duotone.ops.op import Signal


@dataclass(frozen=True, eq=False)
class GatherStage(Stage):
    """This rank's rows -> the rows of all ranks; backward sums and scatters."""

    group: str

    def forward(self, x: Tensor, *operands: Any) -> tuple[Any, ...]:
        return all_gather(x, self.group), ()

    def backward(self, dy: Any, kept: Kept, needs: tuple[bool, ...], *extra: Any) -> tuple[Tensor | None, ...]:
        return (reduce_scatter(dy, self.group),)


@dataclass(frozen=True, eq=False)
class ScatterStage(Stage):
    """Sums over the ranks and keeps this rank's rows; backward gathers."""

    group: str

    def forward(self, x: Tensor, *operands: Any) -> tuple[Any, ...]:
        return reduce_scatter(x, self.group), ()

    def backward(self, dy: Any, kept: Kept, needs: tuple[bool, ...], *extra: Any) -> tuple[Tensor | None, ...]:
        return (all_gather(dy, self.group),)


@dataclass(frozen=True, eq=False)
class ReduceStage(Stage):
    """The sum over the ranks; the gradient passes, because every rank has it."""

    group: str

    def forward(self, x: Tensor, *operands: Any) -> tuple[Any, ...]:
        return all_reduce(x, "sum", self.group), ()

    def backward(self, dy: Any, kept: Kept, needs: tuple[bool, ...], *extra: Any) -> tuple[Tensor | None, ...]:
        return (dy,)


class _Collective(BasicOp):
    of: Any

    def __init__(self, process_group: Any) -> None:
        super().__init__()
        self.stage = self.of(process_group.group_name)

    def link(self, signal: Signal, is_first_microbatch: bool | None) -> tuple[Stage, Signal]:
        return self.stage, signal._replace(rows=None, held=None)


class AllGather(_Collective):
    """Rows of all ranks."""

    of = GatherStage


class ReduceScatter(_Collective):
    """This rank's rows of the sum."""

    of = ScatterStage


class AllReduce(_Collective):
    """The sum on every rank."""

    of = ReduceStage
