"""The pipeline: the one autograd function that runs a tuple of stages forward and backward."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx

from duotone.errors import UserError
from duotone.graph_ops import as_of_now
from duotone.numbered import never_compiled
from duotone.pipeline.stage import Gradients, Saved, Stages
from duotone.state.frames import FORWARD
from duotone.tensor import QuantizedTensor
from duotone.tensor.plane import DeferredPlane, Plane

if TYPE_CHECKING:
    from duotone.pipeline.second_order import Exact

T = TypeVar("T")
Outputs = Tensor | tuple[Any, ...]
"""y, or (y, *extra outputs)."""

Shells = list[list[Any]]
"""A saved value without its buffers: (format, shape, part names) of a plane, TENSOR of a tensor,
(DEFERRED, make, number of tensors) of a deferred plane. None and tuples of one element stand for themselves."""

TENSOR, DEFERRED = "tensor", "deferred"
is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor  # type: ignore[attr-defined]
are_transforms_active = torch._C._are_functorch_transforms_active


class PipelineContext(FunctionCtx):
    """What the forward of a pipeline saves for its backward."""

    backward_of: "Backward"
    extra: int  # outputs after y
    shells: Shells  # of what each basic stage saved, then `backward_of.again`
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]
    maybe_clear_saved_tensors: Callable[[], None]
    _input_metadata: Sequence[Tensor]  # the shape, dtype and device of each output


class Backward(NamedTuple):
    """The stages of the backward pass, in the order of forward; they stand for the same basic stages.

    `again` is for backwards under `create_graph`. Compilers do not trace those and get None.
    """

    stages: Stages
    again: "Exact | Refused | None" = None
    alone: bool = False
    """Whether no other autograd.Function runs the forward."""
    repeated: Mapping[int, int] | None = None
    """In a trace: places among x and the operands whose tensor the function gets only once, at an earlier place."""


class PipelineFunction(torch.autograd.Function):
    """x and the operands of all stages -> y, or (y, *extra outputs) where stages or `backward.again` have such."""

    @staticmethod
    def forward(ctx: PipelineContext, forward: Stages, backward: Backward, x: Tensor, *operands: object) -> Outputs:
        saved: list[Saved] = []
        outputs: list[Tensor] = []
        y, at = x, 0
        if backward.repeated:
            inputs = x, *operands
            operands = tuple([inputs[backward.repeated.get(at, at)] for at in range(1, len(inputs))])
        for stage in forward:
            end = at + sum(stage.arity)
            y, saved_here, extra = stage.run(y, operands[at:end])
            at = end
            saved += saved_here
            if extra:
                outputs += extra
        ctx.backward_of, ctx.extra = backward, len(outputs)
        if backward.again is not None:
            ctx.materialize_grads = bool(outputs)  # y alone nearly always has a gradient
            saved.append(backward.again.save(x, operands, outputs))
        ctx.shells, tensors = pack(saved)
        if backward.again is None:
            tensors = [t if t is None or isinstance(t, QuantizedTensor) else as_of_now(t) for t in tensors]
        ctx.save_for_backward(*tensors)  # type: ignore[arg-type]  # None is allowed
        return (y, *outputs) if outputs else y

    @staticmethod
    def backward(ctx: PipelineContext, *gradients: Tensor) -> Gradients:
        run, again = run_backward, ctx.backward_of.again
        if gradients[0] is None:
            y = ctx._input_metadata[0]
            gradients = torch.zeros(tuple(y.shape), dtype=y.dtype, device=y.device), *gradients[1:]
        if isinstance(again, Refused) and is_legacy_batched(gradients[0]):
            again.refuse_batch()
        if again is None:
            run = run_traced_backward
        elif torch.is_grad_enabled():
            run = again.differentiate
        device = gradients[0].device.type
        # A trace does not enter torch.autocast here: on CUDA, Dynamo of torch 2.11 then ends in an assertion.
        if device == "meta" or not torch.is_autocast_enabled(device):
            return run(ctx, gradients)
        with torch.autocast(device, enabled=False):
            return run(ctx, gradients)


def run_backward(
    ctx: PipelineContext, gradients: tuple[Tensor, ...], tensors: Sequence[Tensor] | None = None
) -> Gradients:
    """The gradients of all arguments, from those of y and of the extra outputs of stages.

    `tensors` are the saved tensors if they are known: a checkpoint hands them out once.
    """
    needs, extra = ctx.needs_input_grad, ctx.extra
    if repeated := ctx.backward_of.repeated:
        needs = *needs[:2], *[needs[2 + repeated.get(at, at)] for at in range(len(needs) - 2)]
    saved = unpack(ctx.shells, ctx.saved_tensors if tensors is None else tensors)
    stages, outputs = ctx.backward_of.stages, gradients[1:]
    last, at = len(saved) - (ctx.backward_of.again is not None), len(needs)
    if len(stages) == 1:  # in less host time
        dx, single = stages[0].run_backward(gradients[0], saved[:last], needs[FIXED:], outputs[:extra])
        return None, None, dx if needs[2] else None, *single
    if tensors is None and not torch.compiler.is_dynamo_compiling():
        # Unless the graph is kept, the saved tensors of a stage are freed before the next stage runs.
        ctx.maybe_clear_saved_tensors()
    handed: list[Any] = [gradients[0]]
    of_operands: list[Tensor | None] = []
    for stage in reversed(stages):
        first, start = last - len(stage.arity), at - sum(stage.arity)
        of_stage = outputs[extra - stage.extra_outputs : extra] if stage.extra_outputs else ()
        saved_here = saved[first:last]
        del saved[first:]
        # Popped: no other reference keeps the gradient in memory when the stage is done with it.
        dx, gradients_here = stage.run_backward(handed.pop(), saved_here, needs[start:at], of_stage)
        handed.append(dx)
        del dx
        of_operands = [*gradients_here, *of_operands]
        last, extra, at = first, extra - stage.extra_outputs, start
        if not any(needs[2:at]):
            break  # earlier stages saved nothing
    missing = at - FIXED
    return None, None, handed[0] if needs[2] else None, *[None] * missing, *of_operands


def run_traced_backward(ctx: PipelineContext, gradients: tuple[Tensor, ...]) -> Gradients:
    """`run_backward` in a trace. The gradient of x becomes plain: no graph gives its inputs quantized gradients."""
    if torch.compiler._is_exporting_flag:  # nothing was saved: a program has no backward
        return (None,) * len(ctx.needs_input_grad)
    for stage in ctx.backward_of.stages:
        if stage.rolls_forward_alone:
            stage.roll_after(gradients[0])
    repeated = ctx.backward_of.repeated or {}
    forward, backward, dx, *of_operands = run_backward(ctx, gradients)
    inputs = [dx.dequantize() if isinstance(dx, QuantizedTensor) else dx, *of_operands]
    for at in sorted(repeated):  # in the order of eager code
        before, gradient, inputs[at] = inputs[repeated[at]], inputs[at], None
        if gradient is not None:
            inputs[repeated[at]] = gradient if before is None else before + gradient
    return forward, backward, *inputs


_apply = super(torch.autograd.Function, PipelineFunction).apply  # type: ignore[misc]
_unwrap = torch._C._functorch.unwrap_if_dead  # type: ignore[attr-defined]


@never_compiled
def apply_eagerly(forward: Stages, backward: Backward, x: Tensor, *operands: object) -> Outputs:
    """`PipelineFunction.apply` outside of traces and transforms of torch.func, in less host time."""
    around, FORWARD.is_alone = FORWARD.is_alone, backward.alone
    try:
        return _apply(forward, backward, _unwrap(x), *operands)
    finally:
        FORWARD.is_alone = around


def apply_traced(forward: Stages, backward: Backward, *operands: object) -> Outputs:
    """`PipelineFunction.apply` in a trace. Dynamo takes no tensor twice: one that comes again is a view.

    Backward reaches the newest view first, so views in reverse add gradients in the order of eager code. Dynamo knows
    no planes of views, so a quantized tensor that comes again is left out, and the function adds its gradients.
    """
    distinct = list(operands)
    repeated: dict[int, int] = {}
    for at in reversed(range(len(operands))):
        operand = operands[at]
        same = [i for i in range(at) if operands[i] is operand]
        if same and isinstance(operand, QuantizedTensor):
            distinct[at], repeated[at] = None, same[0]
        elif same and isinstance(operand, Tensor):
            distinct[at] = operand.view_as(operand)
    return PipelineFunction.apply(forward, backward._replace(repeated=repeated) if repeated else backward, *distinct)


class Runner:
    """Runs pipelines: `apply(forward, backward, x, *operands)`."""

    def __init__(self) -> None:
        self.apply: Callable[..., Outputs] = apply_eagerly

    @contextmanager
    def watched(self, watch: Callable[..., Outputs]) -> Iterator[None]:
        """Run pipelines as `watch(apply, forward, backward, x, *operands)`: for an observer of one step."""
        apply = self.apply
        self.apply = partial(watch, apply)
        try:
            yield
        finally:
            self.apply = apply


RUNNER = Runner()
FIXED = 3
"""Arguments before the operands: the stages of both passes, and x."""


def pack(saved: Sequence[Saved]) -> tuple[Shells, list[Tensor | None]]:
    """The saved values of each basic stage, as shells and a flat list of buffers."""
    shells: Shells = []
    tensors: list[Tensor | None] = []
    for each in saved:
        entry: list[object] = []
        shells.append(entry)
        for one in each:
            if isinstance(one, Plane):
                entry.append((one.format, one.shape, tuple(one.parts)))
                tensors.extend(one.parts.values())
            elif isinstance(one, Tensor):
                entry.append(TENSOR)
                tensors.append(one)
            elif isinstance(one, DeferredPlane):
                entry.append((DEFERRED, one.make, len(one.tensors)))
                tensors.extend(one.tensors)
            else:
                entry.append(one)
    return shells, tensors


def unpack(shells: Shells, tensors: Sequence[Any]) -> list[Saved]:
    """The inverse of `pack`. A second backward may call it again."""
    remaining = iter(tensors)
    saved: list[Saved] = []
    for each in shells:
        values: list[object] = []
        for shell in each:
            if shell is None or len(shell) == 1:
                values.append(shell)
            elif shell is TENSOR:
                values.append(next(remaining))
            elif shell[0] is DEFERRED:
                _, make, count = shell
                values.append(DeferredPlane(make, tuple(islice(remaining, count))))
            else:
                fmt, shape, names = shell
                values.append(Plane(fmt, dict(zip(names, remaining, strict=False)), shape))
        saved.append(tuple(values))
    return saved


class GradientContext(FunctionCtx):
    """What the forward of `WithGradient` saves for its backward."""

    gradients: Callable[..., Gradients]
    count: int


class WithGradient(torch.autograd.Function):
    """See `with_gradient`."""

    @staticmethod
    def forward(ctx: GradientContext, value: Callable[..., T], gradients: Callable[..., Gradients], *x: Tensor) -> T:
        ctx.gradients, ctx.count = gradients, len(x)
        ctx.set_materialize_grads(False)
        return value(*x)

    @staticmethod
    def backward(ctx: GradientContext, *gradients: Tensor | None) -> Gradients:
        is_needed = any(gradient is not None for gradient in gradients)
        return None, None, *(ctx.gradients(*gradients) if is_needed else (None,) * ctx.count)


def with_gradient(value: Callable[..., T], gradients: Callable[..., Gradients], *x: Tensor) -> T:
    """`value(*x)`. `gradients` computes the gradient of each x from those of the outputs, if an output has one."""
    return WithGradient.apply(value, gradients, *x)


class Refused:
    """Stages without a second derivative. Computing one is an error; `create_graph` alone is not.

    An empty extra output stands in the graph for everything that the gradients depend on. It holds no memory.
    """

    marks = True

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.message = (
            f"{reason}, so it has no second derivative and none of torch.func or forward-mode AD; "
            "call duotone.revert(model), or run it under duotone.autocast(enabled=False)"
        )

    def save(self, x: Tensor, operands: tuple[object, ...], outputs: list[Tensor]) -> Saved:
        """Append the empty extra output, which backward saves."""
        mark = torch.empty(0)
        outputs.append(mark)
        return (mark,)

    def differentiate(self, ctx: PipelineContext, gradients: tuple[Tensor, ...]) -> Gradients:
        """The gradients, whose own gradient is an error."""
        saved = ctx.saved_tensors
        return with_gradient(lambda _, *dy: run_backward(ctx, dy, saved), self.check, saved[-1], *gradients)

    def refuse_batch(self) -> NoReturn:
        """UserError: torch differentiates for a batch of gradients at once, and formats scale each one by itself."""
        raise UserError(
            f"{self.reason}, so it takes no batch of gradients (is_grads_batched=True, jacobian(vectorize=True)); "
            "differentiate for one gradient after the other"
        )

    def check(self, *gradients: Tensor) -> NoReturn:
        """UserError with the reason."""
        raise UserError(self.message)

    def transformed(self, forward: Stages, backward: Backward, x: Tensor, *operands: object) -> NoReturn:
        """UserError: transforms need a second derivative."""
        self.check()


def is_transformed() -> bool:
    """Whether a torch.func transform or forward-mode AD runs. They do not support custom functions of autograd."""
    return are_transforms_active() or forward_ad._current_level >= 0
