"""OpaqueStage: a stage that a graph calls as one op forward and one backward, in which the eager stage runs.

It serves calls that keep tensors until the next call (cached weights, `main_grad`, delayed gradients). It also serves
groups, whose row counts may lie on a device. What forward saves stays in Python, as long as a graph holds its token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from duotone.comm import group_size
from duotone.errors import UserError
from duotone.graph_ops import STATEFUL, define_op
from duotone.linear.core import LinearStage
from duotone.linear.grouped import GroupedStage
from duotone.linear.plan import LinearPlan
from duotone.pipeline.op import info_of
from duotone.pipeline.rows import View
from duotone.pipeline.stage import Gradients, Needs, Saved, Stage, pack, unpack
from duotone.planned.saved_forwards import FORWARDS, TAKES_NO_VALUES, ForBackward, Token
from duotone.planned.traced_stages import planner_of
from duotone.state.torch_private import mark_effect
from duotone.tensor import QuantizedTensor
from duotone.tensor.plane import Planes

if TYPE_CHECKING:
    from duotone.planned.planned import Planned


@dataclass(frozen=True, eq=False)
class OpaqueStage(Stage):
    """`stage` of the module that `handle` names. `first`: see `Planner.variant`.

    `marked`: the weights whose gradient is zero for autograd, because the real one goes into `main_grad`.
    """

    stage: LinearStage | GroupedStage
    handle: Tensor
    first: bool | None
    marked: tuple[bool, ...]
    gives_weights: bool
    """Whether autograd gets the gradients of weights."""

    refusal = "compiled, it is one op"

    @property
    def plan(self) -> LinearPlan:
        """The plan of the wrapped stage."""
        return self.stage.plan

    @property
    def arity(self) -> tuple[int, ...]:
        return self.stage.arity

    @property
    def rolls_forward_alone(self) -> bool:
        return self.plan.rolls_forward_alone

    def forward(self, x: Tensor, *operands: Any) -> tuple[Tensor, Saved]:
        splits, seed, weights, biases = self.stage.named(operands)
        parts = [part for w in weights for part in (w.parts if isinstance(w, QuantizedTensor) else (w,))]
        shares = self.plan.input.may_share, self.plan.weight.may_share
        counts = splits if isinstance(splits, tuple | list) else ()
        splits = splits if isinstance(splits, Tensor) else None
        size = (self._rows(x.shape[0]), *x.shape[1:-1], weights[0].shape[0])
        name = self.stage.name
        y, token = torch.ops.duotone.stage_forward(
            x, parts, biases, seed, splits, counts, self.handle, name, self.first, shares, size
        )
        sources = [*([x] if shares[0] else ()), *(parts if shares[1] else ())]
        return y, (token, (x.shape,), *sources)

    def backward(self, dy: Tensor, saved: Saved, needs: Needs, *extra: Tensor) -> Gradients:
        token, (size,), *sources = saved
        _, _, weights, biases = self.stage.named(needs[1:])
        plan = self.plan
        of_input, of_weights = needs[0] and plan.input_grad, [need and plan.weight_grad for need in weights]
        op = torch.ops.duotone.stage_backward if self.gives_weights else torch.ops.duotone.stage_backward_kept
        gradients = iter(op(dy, token, sources, size, of_input, of_weights, biases, self.gives_weights))
        dx = next(gradients) if of_input else None
        zeros = dy.new_zeros(()).expand(dy.shape[-1], size[-1]) if any(self.marked) else None
        dw = [
            next(gradients) if need and self.gives_weights else zeros if need and marked else None
            for need, marked in zip(of_weights, self.marked, strict=True)
        ]
        db = [next(gradients) if need else None for need in biases]
        return dx, *self.stage.ordered((None, None, dw, db))

    def _rows(self, rows: int) -> int:
        """The first dimension of the output: sequence parallelism gathers or scatters it."""
        layout = self.plan.layout
        if not layout.sequence_parallel:
            return rows
        size = group_size(layout.group)
        return rows * size if layout.mode == "column" else rows // size


def _forward(  # noqa: PLR0913 (the arguments of the op)
    x: Tensor,
    parts: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    seed: Tensor | None,
    splits: Tensor | None,
    counts: Sequence[int],
    handle: Tensor,
    plan: str,
    first: bool | None,
    shares: Sequence[bool],
    size: Sequence[int],
) -> tuple[Tensor, Tensor]:
    planner = planner_of(handle)
    module, stage = planner.module, planner.eager_stage(plan, first)
    weights, seed = _whole(module, parts), None if seed is None else seed.clone()
    info = info_of(x)
    accepted = (
        module.accept(stage, info, (tuple(counts) if splits is None else splits,)) if module.extra_inputs else (None,)
    )
    operands = cast(Sequence[Any], stage.ordered((accepted[0], seed, weights, biases)))
    y, saved = stage.forward(x, *operands)
    shells, tensors = pack([saved])
    sources = [*([x] if shares[0] else ()), *(parts if shares[1] else ())]
    entry = ForBackward(stage, shells, [View.of(tensor, sources) or tensor for tensor in tensors])
    return y.contiguous(), Token(torch.tensor([int(FORWARDS.add(entry))], device="cpu"), entry)


def _whole(module: "Planned", parts: Sequence[Tensor]) -> list[Tensor]:
    """The weights of a module over other buffers: themselves, or those of quantized tensors."""
    buffers = iter(parts)
    return [
        weight.with_planes(Planes(*[plane and plane.map(lambda _: next(buffers)) for plane in weight.planes]))
        if isinstance(weight, QuantizedTensor)
        else next(buffers)
        for weight in module.weights
    ]


def _backward(
    dy: Tensor,
    token: Tensor,
    sources: Sequence[Tensor],
    size: Sequence[int],
    of_input: bool,
    of_weights: Sequence[bool],
    of_biases: Sequence[bool],
    gives: bool,
) -> list[Tensor]:
    entry = FORWARDS.get(str(token.item()))
    if entry is None:
        raise UserError(TAKES_NO_VALUES)
    stage = entry.stage
    waits = any(linear.sink.waits for linear in stage.linears)  # then the product outlives the graph's buffers
    tensors = entry.restore(sources, waits)
    if waits and stage.plan.gradient.may_share:
        dy = dy.clone()
    needs = stage.ordered((False, False, of_weights, of_biases))
    (saved,) = unpack(entry.shells, tensors)
    dx, *of_operands = stage.backward(dy, saved, (of_input, *map(bool, needs)))
    _, _, dw, db = stage.named(of_operands)
    needed_outputs = (of_input, *(of_weights if gives else ()), *of_biases)
    gradients = cast(Sequence[Any], (dx, *(dw if gives else ()), *db))
    return [each.contiguous() for each, need in zip(gradients, needed_outputs, strict=True) if need]


def _fake_forward(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(arguments[-1]), torch.empty(1, dtype=torch.int64, device="cpu")


def _fake_backward(
    dy: Tensor, token: Tensor, sources: Sequence[Tensor], size: Sequence[int], of_input: bool, *needs: Any
) -> list[Tensor]:
    of_weights, of_biases, gives = needs
    out, width = dy.shape[-1], size[-1]
    weights = [dy.new_empty((out, width)) for need in of_weights if need and gives]
    biases = [dy.new_empty(out) for need in of_biases if need]
    return [*([dy.new_empty(size)] if of_input else ()), *weights, *biases]


_STAGE_FORWARD = (
    "stage_forward(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor? seed, Tensor? splits, SymInt[] counts, "
    "Tensor handle, str plan, bool? first, bool[] shares, SymInt[] size) -> (Tensor, Tensor)"
)
_GRADIENTS = (
    "(Tensor dy, Tensor token, Tensor[] sources, SymInt[] size, bool input, bool[] weights, bool[] biases, "
    "bool gives) -> Tensor[]"
)
define_op(_STAGE_FORWARD, _forward, _fake_forward, tags=STATEFUL)
define_op(f"stage_backward{_GRADIENTS}", _backward, _fake_backward, tags=STATEFUL)
define_op(f"stage_backward_kept{_GRADIENTS}", _backward, _fake_backward, tags=STATEFUL)
mark_effect("duotone::stage_backward_kept")  # a graph may need none of its outputs
