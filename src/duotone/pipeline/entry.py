"""The door of compiled code: stages of a graph are one op forward and one op backward, which run what eager code runs.

A graph names its stages and holds no plan. What only one module has, such as its delayed scales, it finds by a handle.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from duotone.allocate import rows_below
from duotone.errors import UserError
from duotone.graph_ops import STATEFUL, as_of_now, define_op
from duotone.numbered import constant_in_traces
from duotone.pipeline.autograd import Backward, Outputs, PipelineFunction
from duotone.pipeline.row_call import DIFFERENTIATE, PLAIN, RUN, RowCall, numbers_of
from duotone.pipeline.rows import (
    MOST,
    SEPARATOR,
    first_run,
    flat,
    named,
    parts_of,
    plain_stages,
    remember,
    row_of,
    shapes_of,
)
from duotone.pipeline.saved_forwards import ForBackward, Token, forward_of
from duotone.pipeline.stage import AUTOGRAD, ELSEWHERE_WITH_ZEROS, Stages
from duotone.state.rolling import roll_after
from duotone.state.torch_private import call_directly, mark_effect
from duotone.tensor import QuantizedTensor


def _run(
    x: Tensor, operands: Sequence[Tensor | None], handles: list[Tensor], text: str, symbols: list[int]
) -> list[Tensor]:
    """y and what is kept. See `RowCall` for the last two arguments."""
    call = RowCall.of(text)
    row, structures = row_of(call.names, handles, True)
    sizes, tensors = call.quantized_sizes(symbols), call.whole(x, operands, rows_below)
    outputs, structure = row.forward(tensors, (call.codes, call.sources, sizes), (call.choice, sizes))
    if row.keeps:
        y, *kept = outputs
        return [y, Token.of(ForBackward(row, structure, kept, x.device))]
    remember(structures, (*call.key, *symbols) if symbols else call.key, structure)
    return outputs


def _shapes(
    x: Tensor, operands: Sequence[Tensor | None], handles: list[Tensor], text: str, symbols: list[int]
) -> list[Tensor]:
    """The results of `_run`, without values: from the stages that the names stand for, which know no module."""
    call = RowCall.of(text)
    outputs = shapes_of(call, call.whole(x, operands, torch.cat), call.quantized_sizes(symbols))
    if any(part.keeps for part in parts_of(call.names)):  # what it keeps stays outside of the graph
        return [outputs[0], torch.empty(1, dtype=torch.int64, device="cpu")]
    return outputs


def _gradients(
    dy: Tensor,
    kept: list[Tensor],
    token: Tensor | None,
    sources: list[Any],
    handles: list[Tensor],
    text: str,
    symbols: list[int],
) -> list[Tensor]:
    """The gradients for autograd."""
    call = RowCall.of(text)
    if token is None:
        row, structures = row_of(call.names, handles, False)
        structure = structures.get((*call.key, *symbols) if symbols else call.key)
        if structure is None:
            raise UserError(f"more than {MOST} sizes of inputs came between a compiled forward and its backward")
    else:
        forward = forward_of(token)
        row, structure, kept = forward.row, forward.structure, forward.restored()
    if row.rolls:
        roll_after(dy)
    if row.waits:  # the product outlives the memory of the graph
        dy, sources = dy.clone(), [None if each is None else each.clone() for each in sources]
    given = [dy, *structure.saved([*sources, *kept])]
    return row.backward(given, (structure.shells_over(sources), call.sinks), call.choice)  # type: ignore[no-any-return]


def _gradient_shapes(
    dy: Tensor, kept: object, token: object, sources: object, handles: object, text: str, symbols: list[int]
) -> list[Tensor]:
    """The results of `_gradients`, without values."""
    call = RowCall.of(text)
    sizes = zip(call.sizes(symbols), call.sinks, strict=True)
    return [dy.new_empty(each) for each, sink in sizes if sink == AUTOGRAD]


for _name, _tags in (("row", ()), ("stateful_row", STATEFUL)):
    define_op(f"{_name}{RUN}", _run, _shapes, tags=_tags)
    define_op(f"{_name}_gradients{DIFFERENTIATE}", _gradients, _gradient_shapes, tags=_tags)
    for _end, _kernel in (("", _run), ("_gradients", _gradients)):
        call_directly(getattr(torch.ops.duotone, f"{_name}{_end}").default, _kernel)
define_op(f"storing_row_gradients{DIFFERENTIATE}", _gradients, _gradient_shapes, tags=STATEFUL)
mark_effect("duotone::storing_row_gradients")  # a graph may need none of its outputs


class RowFunction(torch.autograd.Function):
    """x and the operands of a row -> y, by one op in forward and one in backward."""

    @staticmethod
    def forward(ctx: Any, handles: list[Tensor], row: str, x: Tensor, *operands: Tensor | None) -> Tensor:
        parts = named(row)
        known = parts_of(names := tuple([part.name for part in parts]))
        of_operands = [known[0].sources[0], *[is_source for part in known for is_source in part.sources[1:]]]
        flat_parts, held, flags = list[Tensor | None](), list[int](), list[bool]()
        for operand, is_source in zip((x, *operands), of_operands, strict=True):
            of_operand, how = flat(operand)
            held.append(PLAIN * len(of_operand) + how)
            flat_parts += of_operand
            flags += [is_source] * len(of_operand)
        flags.append(known[-1].keeps_output)
        numbers, symbols = numbers_of(x, operands)
        call = RowCall(names, tuple(held), tuple(flags), numbers=numbers)
        run = torch.ops.duotone.stateful_row if handles else torch.ops.duotone.row
        y, *kept = run(flat_parts[0], flat_parts[1:], handles, call.text, symbols)
        ctx.call, ctx.symbols, ctx.count, ctx.handles = call, symbols, len(kept), handles
        ctx.keeps = any(part.keeps for part in known)
        ctx.sinks = [int(known[0].input_grad) * AUTOGRAD]
        for part, its in zip(parts, known, strict=True):
            ctx.sinks += map(int, part.sinks or str(AUTOGRAD) * (len(its.sources) - 1))
        if known[0].recomputes:  # a partitioner keeps inputs of ops that fuse with nothing; a power of 1 fuses with x
            flat_parts[0] = x.pow(1.0)
        sources = [each if is_source else None for each, is_source in zip((*flat_parts, y), flags, strict=True)]
        saved = [None if each is None else as_of_now(each) for each in sources]
        ctx.save_for_backward(*kept, *saved)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        handles, needs = ctx.handles, ctx.needs_input_grad[2:]
        run = torch.ops.duotone.stateful_row_gradients if handles else torch.ops.duotone.row_gradients
        if max(ctx.sinks) > AUTOGRAD:
            run = torch.ops.duotone.storing_row_gradients
        kept, sources = [*ctx.saved_tensors[: ctx.count]], [*ctx.saved_tensors[ctx.count :]]
        token = kept.pop() if ctx.keeps else None
        # Backward runs the same op whether x needs a gradient in this graph or not.
        sinks = [sink if need else 0 for sink, need in zip(ctx.sinks, (True, *needs[1:]), strict=True)]
        call = replace(ctx.call, sinks=tuple(sinks))
        results = iter(run(dy, kept, token, sources, handles, call.text, ctx.symbols))
        gradients: list[Tensor | None] = []
        for sink, of_one in zip(sinks, call.sizes(ctx.symbols), strict=True):
            if sink == AUTOGRAD:
                gradients.append(next(results))
            else:
                gradients.append(dy.new_zeros(()).expand(of_one) if sink == ELSEWHERE_WITH_ZEROS else None)
        return None, None, gradients[0] if needs[0] else None, *gradients[1:]


def run_plain(x: Tensor, operands: Sequence[Tensor | None], numbers: str, row: str) -> Tensor:
    """The output of a row, by its operations. `numbers`: see `rows.plain_stages`."""
    stages = plain_stages(row, numbers.split(SEPARATOR))
    return PipelineFunction.apply(stages, Backward(stages), x, *operands)


def _run_row(
    x: Tensor, operands: Sequence[Tensor | None], handles: list[Tensor], numbers: str | None, row: str
) -> Tensor:
    if numbers is not None:
        return run_plain(x, operands, numbers, row)
    return RowFunction.apply(handles, row, x, *operands)  # type: ignore[no-any-return]


# Dynamo takes it as one node, and does not trace the function. AOTAutograd does, and finds the ops of the row.
_ROW = "Tensor x, Tensor?[] operands, Tensor[] handles, str? numbers, str row"
define_op(f"differentiable_row({_ROW}) -> Tensor", _run_row)


@constant_in_traces
def _take_as_it_is() -> None:
    """Let Dynamo take `run_plain` as one node: an op would stay in a program of torch.export, which others load."""
    torch.compiler.allow_in_graph(run_plain)


class HasHandle(Protocol):
    """A module of a pipeline."""

    handle: Tensor | None
    """By which ops find the module, if they have to."""
    number: str
    """The number that the handle holds."""


def apply_in_graph(stages: Stages, ops: Sequence[HasHandle], x: Tensor, *operands: Any) -> Outputs:
    """In a trace: the output of a pipeline, (y, *extra outputs) where stages have such.

    `ops`: the modules of the stages.
    """
    outputs, at, first = [x], 0, 0
    while first < len(stages):
        names = SEPARATOR.join([stage.row_part for stage in stages[first:]])
        length, kind = first_run(names, isinstance(outputs[0], QuantizedTensor))
        last = first + length
        run = stages[first:last]
        end = at + sum([sum(stage.arity) for stage in run])
        outputs[0], *extra = _apply_run(kind, run, ops[first:last], outputs[0], operands[at:end])
        outputs += extra
        first, at = last, end
    return tuple(outputs) if len(outputs) > 1 else outputs[0]


def _replayed(run: Stages, x: Tensor, operands: Sequence[Any]) -> list[Tensor]:
    """The outputs of stages in operations that compilers differentiate."""
    outputs, at = [x], 0
    for stage in run:
        end = at + sum(stage.arity)
        y, *extra = stage.replay(outputs[0], operands[at:end], None)
        outputs, at = [y, *outputs[1:], *extra], end
    return outputs


def _apply_run(kind: str, run: Stages, ops: Sequence[HasHandle], x: Tensor, operands: Sequence[Any]) -> Sequence[Any]:
    """The outputs of a run of stages, of a kind of `first_run`."""
    if not kind:
        return _replayed(run, x, operands)
    row, pairs = SEPARATOR.join([stage.row_part for stage in run]), [*zip(ops, run, strict=True)]
    run_row, is_program = torch.ops.duotone.differentiable_row, torch.compiler._is_exporting_flag
    if kind == "row" and not is_program:
        return (run_row(x, [*operands], [op.handle for op, stage in pairs if stage.has_owner], None, row),)
    numbers = SEPARATOR.join([op.number if stage.has_owner else "" for op, stage in pairs])  # guards know modules by it
    if not is_program:
        return (run_row(x, [*operands], [], numbers, row),)
    _take_as_it_is()
    return (run_plain(x, [*operands], numbers, row),)
