"""The pipeline: the one autograd function that runs a tuple of stages forward and backward."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from duotone.custom_gradient import with_gradient
from duotone.errors import UserError
from duotone.graph_ops import as_of_now
from duotone.numbered import never_compiled
from duotone.pipeline.bound import Bindings
from duotone.pipeline.row_call import RowPart
from duotone.pipeline.second_order import Exact
from duotone.pipeline.stage import Gradients, Needs, Saved, SavedContext, Shells, Stages, pack, unpack
from duotone.state.frames import FORWARD
from duotone.state.torch_private import are_transforms_active, is_asked, is_legacy_batched
from duotone.tensor import QuantizedTensor

Outputs = Tensor | tuple[Any, ...]
"""y, or (y, *extra outputs)."""


class PipelineContext(SavedContext):
    """What the forward of a pipeline saves for its backward."""

    backward_of: "Backward"
    extra: int  # outputs after y
    bound: Bindings | None  # what runs the backward
    tensors: tuple[bool, ...]  # which of x and the operands are tensors
    next_functions: Sequence[tuple[torch.autograd.graph.Node | None, int]]  # of each tensor
    maybe_clear_saved_tensors: Callable[[], None]
    _input_metadata: Sequence[Tensor]  # the shape, dtype and device of each output


class Backward(NamedTuple):
    """The stages of the backward pass, in the order of forward; they stand for the same basic stages.

    `again` is for backwards under `create_graph`. Compilers do not trace those and get None. `bound` runs forwards, and
    gives what runs their backwards; None where stages run themselves.
    """

    stages: Stages
    again: "Exact | Refused | None" = None
    alone: bool = False
    """Whether no other autograd.Function runs the forward."""
    bound: "Bindings | None" = None
    stores: bool = False
    """Whether gradients go elsewhere than into autograd."""


class PipelineFunction(torch.autograd.Function):
    """x and the operands of all stages -> y, or (y, *extra outputs) where stages or `backward.again` have such."""

    @staticmethod
    def forward(ctx: PipelineContext, forward: Stages, backward: Backward, x: Tensor, *operands: object) -> Outputs:
        ctx.backward_of, ctx.bound = backward, None
        if backward.stores:
            ctx.tensors = tuple([isinstance(each, Tensor) for each in (x, *operands)])
        if backward.bound is not None:
            outputs, tensors, ctx.shells, ctx.extra, ctx.bound = backward.bound([x, *operands])
        else:
            outputs, tensors, ctx.shells, ctx.extra = run_forward(forward, backward.again, x, operands)
        if backward.again is not None:
            ctx.materialize_grads = len(outputs) > 1  # y alone nearly always has a gradient
        else:
            tensors = [t if t is None or isinstance(t, QuantizedTensor) else as_of_now(t) for t in tensors]
        ctx.save_for_backward(*tensors)  # type: ignore[arg-type]  # None is allowed
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    @staticmethod
    def backward(ctx: PipelineContext, *gradients: Tensor) -> Gradients:
        run = run_backward if ctx.bound is None else run_bound_backward
        again = ctx.backward_of.again
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


def run_forward(
    stages: Stages, again: "Exact | Refused | None", x: Tensor, operands: tuple[Any, ...]
) -> tuple[list[Tensor], list[Tensor | None], Shells, int]:
    """y and the outputs after it; what backward needs, as flat tensors and their shells; the extra outputs of stages.

    Outputs that `again` adds come last and do not count.
    """
    saved: list[Saved] = []
    outputs = [x]
    at = 0
    for stage in stages:
        end = at + sum(stage.arity)
        outputs[0], saved_here, extra = stage.run(outputs[0], operands[at:end])
        at = end
        saved += saved_here
        if extra:
            outputs += extra
    count = len(outputs) - 1
    if again is not None:
        saved.append(again.save(x, operands, outputs))
    shells, tensors = pack(saved)
    return outputs, tensors, shells, count


def run_bound_backward(ctx: PipelineContext, gradients: tuple[Tensor, ...]) -> Gradients:
    """`run_backward` of a forward that was bound."""
    assert ctx.bound is not None
    needs, tensors = ctx.needs_input_grad[2:], [*gradients[: 1 + ctx.extra], *ctx.saved_tensors]
    if len(ctx.backward_of.stages) > 1:
        ctx.maybe_clear_saved_tensors()
    return ctx.bound(tensors, (ctx.shells, ctx.extra, needs), needs)  # type: ignore[no-any-return]


def run_backward(
    ctx: PipelineContext, gradients: tuple[Tensor, ...], tensors: Sequence[Tensor] | None = None
) -> Gradients:
    """The gradients of all arguments, from those of y and of the extra outputs of stages.

    `tensors` are the saved tensors if they are known: a checkpoint hands them out once.
    """
    needs, stages = ctx.needs_input_grad[2:], ctx.backward_of.stages
    if ctx.backward_of.stores:
        needs = _asked(ctx, needs)
    saved = unpack(ctx.shells, ctx.saved_tensors if tensors is None else tensors)
    if ctx.backward_of.again is not None:
        del saved[-1]  # what second derivatives need
    if len(stages) > 1 and tensors is None and ctx.backward_of.again is not None:
        # Unless the graph is kept, the saved tensors of a stage are freed before the next stage runs.
        ctx.maybe_clear_saved_tensors()
    return None, None, *differentiate(stages, [gradients[0]], gradients[1 : 1 + ctx.extra], saved, needs)


def _asked(ctx: PipelineContext, needs: Needs) -> Needs:
    """Which gradients this backward asks for. `torch.autograd.grad(loss, x)` must store none of a weight."""
    nodes = iter(ctx.next_functions)
    of_each = [next(nodes)[0] if is_tensor else None for is_tensor in ctx.tensors]
    return tuple([need and (node is None or is_asked(node)) for need, node in zip(needs, of_each, strict=True)])


def differentiate(
    stages: Stages, handed: list[Any], outputs: Sequence[Tensor], saved: list[Saved], needs: Needs
) -> list[Tensor | None]:
    """The gradients of x and of all operands. `needs` says which are needed.

    `handed` holds the gradient of y and `saved` what each basic stage saved. Both are emptied on the way: no other
    reference keeps the gradient of a stage in memory when that is done with it.
    """
    extra, last, at = len(outputs), len(saved), len(needs)
    of_operands: list[Tensor | None] = []
    for stage in reversed(stages):
        first, start = last - len(stage.arity), at - sum(stage.arity)
        of_stage = outputs[extra - stage.extra_outputs : extra] if stage.extra_outputs else ()
        saved_here = saved[first:last]
        del saved[first:]
        dx, gradients_here = stage.run_backward(handed.pop(), saved_here, needs[start:at], of_stage)
        handed.append(dx)
        del dx
        of_operands = [*gradients_here, *of_operands]
        last, extra, at = first, extra - stage.extra_outputs, start
        if not any(needs[:at]):
            break  # earlier stages saved nothing
    return [handed[0] if needs[0] else None, *[None] * (at - 1), *of_operands]


def run_traced_backward(ctx: PipelineContext, gradients: tuple[Tensor, ...]) -> Gradients:
    """`run_backward` in a trace. The gradient of x becomes plain: no graph gives its inputs quantized gradients."""
    if torch.compiler._is_exporting_flag:  # nothing was saved: a program has no backward
        return (None,) * len(ctx.needs_input_grad)
    forward, backward, dx, *of_operands = run_backward(ctx, gradients)
    return forward, backward, dx.dequantize() if isinstance(dx, QuantizedTensor) else dx, *of_operands


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


def second_order(stages: Stages, name: str) -> Exact | Refused:
    """How backwards under `create_graph` go through the stages of the module `name`."""
    basics = tuple(basic for stage in stages for basic in stage.basics)
    refusal = next((basic.refusal for basic in basics if basic.refusal), "")
    if any(stage.row_part and RowPart.of(stage.row_part).keeps for stage in stages):
        refusal = refusal or "compiled, it is one op"
    return Refused(f"{name or 'a module'}: {refusal}") if refusal else Exact(basics)


def is_transformed() -> bool:
    """Whether a torch.func transform or forward-mode AD runs. They do not support custom functions of autograd."""
    return are_transforms_active() or forward_ad._current_level >= 0
