"""The door of compiled code: stages of a graph are one op forward and one op backward, which run what eager code runs.

A graph names its stages and holds no plan. What only one module has, such as its delayed scales, it finds by a handle.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from duotone.allocate import rows_below
from duotone.errors import UserError
from duotone.graph_ops import STATEFUL, as_of_now, define_op
from duotone.pipeline.autograd import Backward, Outputs, apply_traced
from duotone.pipeline.row_call import DIFFERENTIATE, PLAIN, RUN, RowCall, numbers_of
from duotone.pipeline.rows import MOST, SEPARATOR, flat, keeps, remember, row_of, shapes_of
from duotone.pipeline.saved_forwards import ForBackward, Token, forward_of
from duotone.pipeline.stage import AUTOGRAD, ELSEWHERE_WITH_ZEROS, Stages
from duotone.state.rolling import roll_after
from duotone.state.torch_private import mark_effect
from duotone.tensor import QuantizedTensor


def _run(
    x: Tensor, operands: Sequence[Tensor | None], handles: list[Tensor], text: str, symbols: list[int]
) -> list[Tensor]:
    """y and what is kept. See `RowCall` for the last two arguments."""
    call = RowCall.of(text)
    row, structures = row_of(call.names, handles)
    outputs, structure = row.forward(call.whole(x, operands, rows_below), (call.codes, call.sources), call.choice)
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
    outputs = shapes_of(call, call.whole(x, operands, torch.cat))
    if keeps(call.names):
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
        row, structures = row_of(call.names, handles)
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
define_op(f"storing_row_gradients{DIFFERENTIATE}", _gradients, _gradient_shapes, tags=STATEFUL)
mark_effect("duotone::storing_row_gradients")  # a graph may need none of its outputs


class RowContext(FunctionCtx):
    """What the forward of a row saves for its backward."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    call: RowCall
    symbols: list[Any]
    count: int
    row: "TracedRow"


class RowFunction(torch.autograd.Function):
    """x and the operands of a row -> y, by one op in forward and one in backward."""

    @staticmethod
    def forward(ctx: RowContext, row: "TracedRow", x: Tensor, *operands: Tensor | None) -> Tensor:
        run = torch.ops.duotone.stateful_row if row.handles else torch.ops.duotone.row
        parts, held, flags = list[Tensor | None](), list[int](), [row.sources[0]]
        for operand, is_source, record in zip(operands, row.sources[1:], row.records, strict=True):
            of_operand, how = flat(operand)
            if record:
                assert isinstance(operand, QuantizedTensor) and operand.planes.rowwise is not None
                at, (handle, _, name) = operand.planes.rowwise.format.part_names.index("scale"), record.partition(" ")
                of_operand[at] = torch.ops.duotone.traced_recorded(of_operand[at], row.handles[int(handle)], name, 0)
            held.append(PLAIN * len(of_operand) + how)
            parts += of_operand
            flags += [is_source] * len(of_operand)
        numbers, symbols = numbers_of(x, operands)
        call = RowCall(tuple(row.names.split(SEPARATOR)), tuple(held), tuple(flags), numbers=numbers)
        y, *kept = run(x, parts, row.handles, call.text, symbols)
        ctx.call, ctx.symbols, ctx.count, ctx.row = call, symbols, len(kept), row
        if row.recomputes:  # a partitioner keeps inputs of ops that fuse with nothing; a power of 1 fuses with x
            x = x.pow(1.0)
        sources = [each if is_source else None for each, is_source in zip((x, *parts), flags, strict=True)]
        saved = [None if each is None else as_of_now(each) for each in sources]
        ctx.save_for_backward(*kept, *saved)  # type: ignore[arg-type]  # None is allowed
        return y

    @staticmethod
    def backward(ctx: RowContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        row, needs = ctx.row, ctx.needs_input_grad[1:]
        run = torch.ops.duotone.stateful_row_gradients if row.handles else torch.ops.duotone.row_gradients
        if max(row.sinks) > AUTOGRAD:
            run = torch.ops.duotone.storing_row_gradients
        kept, sources = [*ctx.saved_tensors[: ctx.count]], [*ctx.saved_tensors[ctx.count :]]
        token = kept.pop() if row.keeps else None
        sinks = [sink if need else 0 for sink, need in zip(row.sinks, (row.input_grad, *needs[1:]), strict=True)]
        call = replace(ctx.call, sinks=tuple(sinks))
        results = iter(run(dy, kept, token, sources, row.handles, call.text, ctx.symbols))
        gradients: list[Tensor | None] = []
        for sink, of_one in zip(sinks, call.sizes(ctx.symbols), strict=True):
            if sink == AUTOGRAD:
                gradients.append(next(results))
            else:
                gradients.append(dy.new_zeros(()).expand(of_one) if sink == ELSEWHERE_WITH_ZEROS else None)
        return None, gradients[0] if needs[0] else None, *gradients[1:]


class TracedRow(NamedTuple):
    """Neighbouring stages of a trace, as one op forward and one backward.

    `sources` says of x and each operand whether backward reads it as it is. `input_grad`: whether x gets a gradient.
    `recomputes`: a partitioner may compute x again instead of keeping it. `records`: of each operand whose amaxes are
    recorded, the index of the handle and the name of the stage that does; else "". `sinks`: where the gradients of x
    and the operands go. `keeps`: what is kept for backward stays outside of the graph.
    """

    handles: list[Tensor]
    names: str
    sources: list[bool]
    input_grad: bool
    recomputes: bool
    records: list[str]
    sinks: list[int]
    keeps: bool


def _run_row(x: Tensor, operands: Sequence[Tensor | None], *row: Any) -> Tensor:
    return RowFunction.apply(TracedRow(*row), x, *operands)  # type: ignore[no-any-return]


_FLAGS = "str names, bool[] sources, bool input_grad, bool recomputes, str[] records, int[] sinks, bool keeps"
# Dynamo takes it as one node, and does not trace the function. AOTAutograd does, and finds the ops of the row.
define_op(f"differentiable_row(Tensor x, Tensor?[] operands, Tensor[] handles, {_FLAGS}) -> Tensor", _run_row)


def apply_in_graph(stages: Stages, _: object, x: Tensor, *operands: Any) -> Outputs:
    """In a trace: the output of a pipeline, (y, *extra outputs) where stages have such.

    Neighbours that rows hold become one row, if one of them is quantized.
    """
    outputs, at = [x], 0
    run: Stages = ()
    for stage, follower in zip(stages, (*stages[1:], None), strict=True):
        run = (*run, stage)
        if follower is None or (follower.row_part is None) is not (stage.row_part is None):
            first, at = at, at + sum([sum(each.arity) for each in run])
            outputs[0], *extra = _apply_run(run, outputs[0], operands[first:at])
            outputs += extra
            run = ()
    return tuple(outputs) if len(outputs) > 1 else outputs[0]


def _apply_run(run: Stages, x: Tensor, operands: Sequence[Any]) -> Sequence[Any]:
    """The outputs of neighbours of which all or none have row parts."""
    parts = [part for part in [stage.row_part for stage in run] if part is not None]
    if torch.compiler._is_exporting_flag or not any([part.is_quantized for part in parts]):
        stages = tuple([stage.in_graph() for stage in run])  # a program that is exported has their operations
        y = apply_traced(stages, Backward(stages), x, *operands)
        return y if isinstance(y, tuple) else (y,)
    handles: list[Tensor] = []
    records: list[str] = []
    sources, sinks = [parts[0].sources[0]], [AUTOGRAD]
    for stage, part in zip(run, parts, strict=True):
        sinks += part.sinks[1:] or [AUTOGRAD] * (len(part.sources) - 1)
        if len(part.sources) > 1:
            of_first = f"{len(handles)} {part.name.split('@')[0]}" if part.records else ""
            records += [of_first, *[""] * (len(part.sources) - 2)]
            sources += part.sources[1:]
        if (owner := stage.row_owner) is not None:
            handles.append(owner)
    names = SEPARATOR.join([part.name for part in parts])
    is_kept = any([part.keeps for part in parts])
    row = handles, names, sources, parts[0].input_grad, parts[0].recomputes, records, sinks, is_kept
    return (torch.ops.duotone.differentiable_row(x, [*operands], *row),)
