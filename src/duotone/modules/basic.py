"""Small ops of one tensor: identity, bias, scale, dropout, reshape, and collectives over the rows of all ranks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from duotone.comm import all_gather, all_reduce, reduce_scatter
from duotone.errors import UserError
from duotone.linear.core import as_matrix
from duotone.modules.weights import materialise
from duotone.pipeline.op import Op, TensorInfo
from duotone.pipeline.rows import in_parts
from duotone.pipeline.stage import Gradients, Needs, Saved, Stage

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from duotone.kernels.activations import FusedProducer


class PlainStage(Stage):
    """A stage in plain torch: `value` is the forward, so that subclasses only add `backward`."""

    refusal, reads = "", (False,)

    def value(self, x: Tensor, *operands: Tensor) -> Tensor:
        """The output. Autograd can differentiate it any number of times."""
        raise NotImplementedError

    def replay(self, x: Tensor, operands: Sequence[Tensor], saved: Saved | None) -> tuple[Tensor, ...]:
        return (self.value(x, *operands),)

    def forward(self, x: Tensor, *operands: Tensor) -> tuple[Tensor, Saved]:
        return self.value(x, *operands), ()


class ProducerStage(Stage):
    """A stage whose output a cast kernel may compute itself, for the linear behind it. It always saves its input."""

    keeps: bool
    """Whether a backward follows, so that something is saved."""

    def fused_producer(self, x: Tensor, *operands: Tensor | None) -> "FusedProducer | None":
        """The output as a matrix that the cast kernel, or an op of a graph, computes itself; None if it cannot.

        The operands may be followed by what the kernel saved before. Then nothing is measured again.
        """
        raise NotImplementedError

    def keep(self, x: Tensor, *operands: Tensor | None) -> Saved:
        """Saved for backward: the input, the operands, and tensors of the kernel."""
        return (x, *operands) if self.keeps else ()


class IdentityStage(PlainStage):
    """x -> x."""

    def value(self, x: Tensor) -> Tensor:
        return x

    def backward(self, dy: Tensor, saved: Saved, needs: Needs) -> Gradients:
        return (dy,)


class BiasStage(PlainStage):
    """x (*lead, N), bias (N,) -> x + bias."""

    arity, reads, is_bindable = (1,), (False, False), True

    def value(self, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias

    def backward(self, dy: Tensor, saved: Saved, needs: Needs) -> Gradients:
        return dy, as_matrix(dy).sum(0) if needs[1] else None


@dataclass(frozen=True, eq=False)
class ScaleStage(PlainStage):
    """x -> x * scale."""

    scale: float

    def value(self, x: Tensor) -> Tensor:
        return x * self.scale

    def backward(self, dy: Tensor, saved: Saved, needs: Needs) -> Gradients:
        return (dy * self.scale,)


@dataclass(frozen=True, eq=False)
class DropoutStage(Stage):
    """Zeroes with probability p and divides the rest by 1 - p."""

    p: float
    keeps: bool

    reads = (False,)

    @property
    def refusal(self) -> str:
        return "" if self.keeps else "it kept no mask of dropout, because nothing before that needs a gradient"

    def replay(self, x: Tensor, operands: Sequence[Tensor], saved: Saved | None) -> tuple[Tensor, ...]:
        return (torch.dropout(x, self.p, True),) if saved is None else self.backward(x, saved, (True,))

    def forward(self, x: Tensor) -> tuple[Tensor, Saved]:
        y, mask = torch.native_dropout(x, self.p, True)
        return y, (mask,) if self.keeps else ()

    def backward(self, dy: Tensor, saved: Saved, needs: Needs) -> tuple[Tensor]:
        factor = 1 / (1 - self.p) if self.p < 1 else 0.0
        return (torch.ops.aten.native_dropout_backward(dy, saved[0], factor),)


@dataclass(frozen=True, eq=False)
class ReshapeStage(PlainStage):
    """x -> x.reshape(shape)."""

    shape: tuple[int, ...]

    def value(self, x: Tensor) -> Tensor:
        return x.reshape(self.shape)

    def forward(self, x: Tensor) -> tuple[Tensor, Saved]:
        return self.value(x), ((x.shape,),)

    def backward(self, dy: Tensor, saved: Saved, needs: Needs) -> Gradients:
        return (dy.reshape(saved[0][0]),)


class BasicOp(Op, nn.Module):
    """An op whose stage does not depend on the input."""

    stage: Stage = IdentityStage()

    def link(self, info: TensorInfo, is_first_microbatch: bool | Tensor | None) -> tuple[Stage, TensorInfo]:
        return self.stage, info._replace(quantizer=None)


class Identity(BasicOp):
    """x -> x."""


class Bias(BasicOp):
    """Adds a vector of the last dimension's size."""

    stage = BiasStage()

    def __init__(
        self, size: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size, dtype=dtype, device=device))

    def reset_parameters(self) -> None:
        """Zeros; a parameter on meta comes to the default device first."""
        materialise(self)
        nn.init.zeros_(self.bias)

    def link(self, info: TensorInfo, is_first_microbatch: bool | Tensor | None) -> tuple[Stage, TensorInfo]:
        if info.width not in (None, self.bias.shape[0]):
            raise UserError(f"Bias takes (..., {self.bias.shape[0]}); got (..., {info.width}): reshape the input")
        tracked = torch.is_grad_enabled() and self.bias.requires_grad
        return self.stage, info._replace(requires_grad=info.requires_grad or tracked, quantizer=None)

    def operands(self, stage: Stage, info: TensorInfo, extra: Sequence[object]) -> Sequence[Tensor]:
        return (self.bias if self.bias.dtype is info.dtype else self.bias.to(info.dtype),)


class ConstantScale(BasicOp):
    """Multiplies by a number."""

    stage: ScaleStage

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    @property
    def scale(self) -> float:
        """The number, which may change between calls."""
        return self.stage.scale

    @scale.setter
    def scale(self, scale: float) -> None:
        self.stage = ScaleStage(scale)


class Dropout(BasicOp):
    """torch's dropout; the identity in evaluation."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    @property
    def p(self) -> float:
        """The probability of a zero, which may change between calls."""
        return self._by_keeps[True].p

    @p.setter
    def p(self, p: float) -> None:
        if not 0 <= p <= 1:
            raise UserError(f"dropout has probability {p}; give one from 0 to 1")
        self._by_keeps = {keeps: DropoutStage(p, keeps) for keeps in (False, True)}

    def link(self, info: TensorInfo, is_first_microbatch: bool | Tensor | None) -> tuple[Stage, TensorInfo]:
        dropping = self._by_keeps[info.requires_grad]
        return dropping if self.training and self.p else self.stage, info._replace(quantizer=None)


class Reshape(BasicOp):
    """x.reshape(shape); one dimension may be -1."""

    stage: ReshapeStage

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.stage = ReshapeStage(tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the output, as it was given."""
        return self.stage.shape

    def link(self, info: TensorInfo, is_first_microbatch: bool | Tensor | None) -> tuple[Stage, TensorInfo]:
        width, rows = self._sizes(info)
        return self.stage, info._replace(width=width, rows=rows, quantizer=None)

    def _sizes(self, info: TensorInfo) -> tuple[int | None, int | None]:
        """Width and rows of the output, None if the input's are not known. UserError if they do not fit."""
        if info.width is None or info.rows is None:
            return (self.shape[-1] if self.shape[-1] >= 0 else None), None
        elements, product = info.width * info.rows, math.prod([size for size in self.shape if size >= 0])
        free = -1 in self.shape
        if (elements != product and not free) or (free and (not product or elements % product)):
            raise UserError(f"Reshape to {self.shape} takes as many elements; got {info.rows} rows of {info.width}")
        width = self.shape[-1] if self.shape[-1] >= 0 else elements // product
        return width, elements // width if width else 0


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
    row_part: str = ""

    def forward(self, x: Tensor) -> tuple[Tensor, Saved]:
        return self.collective(x, self.group), ()

    def backward(self, dy: Tensor, saved: Saved, needs: Needs) -> Gradients:
        return (self.adjoint(dy, self.group),)


class _Collective(BasicOp):
    pair: ClassVar[tuple[Collective, Collective]]

    def __init__(self, process_group: "ProcessGroup") -> None:
        super().__init__()
        group = process_group.group_name
        stage = CollectiveStage(group, *self.pair)
        self.stage = in_parts(stage, f"{type(self).__name__} of group {group}", (False,), True, is_home=True)

    def link(self, info: TensorInfo, is_first_microbatch: bool | Tensor | None) -> tuple[Stage, TensorInfo]:
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
