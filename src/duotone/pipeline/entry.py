"""The door of compiled code: stages of a graph are one op forward and one op backward, which run what eager code runs.

A graph names its stages and holds no plan. What only one module has, such as its delayed scales, it finds by a handle.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from duotone.allocate import rows_below
from duotone.dispatch.graph_patterns import PLAIN
from duotone.errors import UserError
from duotone.graph_ops import STATEFUL, as_of_now, define_op
from duotone.pipeline.autograd import Backward, Outputs, apply_traced
from duotone.pipeline.rows import MOST, SEPARATOR, flat, keeps, remember, row_of, shapes_of
from duotone.pipeline.saved_forwards import ForBackward, Token, forward_of
from duotone.pipeline.stage import AUTOGRAD, ELSEWHERE_WITH_ZEROS, Stages
from duotone.state.rolling import roll_after
from duotone.state.torch_private import mark_effect
from duotone.tensor import QuantizedTensor


def _whole(
    parts: Sequence[Tensor | None], held: Sequence[int], join: Callable[[Any], Tensor]
) -> tuple[list[Tensor | None], tuple[int, ...]]:
    """The tensors and the codes of operands, without pieces. A negative code says how many pieces an operand has."""
    if min(held, default=0) >= 0:
        return [*parts], tuple(held)
    remaining, whole = iter(parts), list[Tensor | None]()
    for code in held:
        pieces = [next(remaining) for _ in range(-code if code < 0 else code // 4)]
        whole += [join(pieces)] if code < 0 else pieces
    return whole, tuple([max(code, PLAIN) for code in held])


def _run(
    x: Tensor,
    operands: list[Tensor | None],
    held: list[int],
    handles: list[Tensor],
    names: str,
    sources: list[bool],
    *layout: list[int],
) -> list[Tensor]:
    """y and what is kept. `layout`: size and strides of x in the trace, under which backward finds the structure."""
    row, structures = row_of(names, handles)
    whole, codes = _whole(operands, held, rows_below)
    outputs, structure = row.forward([x, *whole], (codes, sources), (codes, *sources))
    if row.keeps:
        y, *kept = outputs
        return [y.contiguous(), Token.of(ForBackward(row, structure, kept, x.device))]
    remember(structures, (names, *map(tuple, layout), codes), structure)
    return outputs


def _shapes(
    x: Tensor,
    operands: list[Tensor | None],
    held: list[int],
    handles: list[Tensor],
    names: str,
    sources: list[bool],
    *_: object,
) -> list[Tensor]:
    """The results of `_run`, without values: from the stages that the names stand for, which know no module."""
    whole, codes = _whole(operands, held, torch.cat)
    outputs = shapes_of(names, [x, *whole], codes, sources)
    if keeps(names):
        return [outputs[0].contiguous(), torch.empty(1, dtype=torch.int64, device="cpu")]
    return outputs


def _gradients(  # noqa: PLR0913 (the arguments of the op)
    dy: Tensor,
    kept: list[Tensor],
    token: Tensor | None,
    sources: list[Any],
    size: list[int],
    stride: list[int],
    shapes: list[int],
    sinks: list[int],
    held: list[int],
    handles: list[Tensor],
    names: str,
) -> list[Tensor]:
    """The gradients for autograd. `sinks`: where those of x and the operands go, 0 for one that nothing needs."""
    if token is None:
        row, structures = row_of(names, handles)
        structure = structures.get((names, tuple(size), tuple(stride), tuple(held)))
        if structure is None:
            raise UserError(f"more than {MOST} sizes of inputs came between a compiled forward and its backward")
    else:
        forward = forward_of(token)
        row, structure, kept = forward.row, forward.structure, forward.restored()
    if row.rolls:
        roll_after(dy)
    if row.waits:  # the product outlives the memory of the graph
        dy, sources = dy.clone(), [None if each is None else each.clone() for each in sources]
    given, shells = [dy, *structure.saved([*sources, *kept])], structure.shells_over(sources)
    needs, dtype = tuple(map(bool, sinks)), dy.dtype
    results = row.backward(given, (shells, needs), needs)
    gradients = [each.to(dtype).contiguous() for each, sink in zip(results, sinks, strict=True) if sink == AUTOGRAD]
    # Results of an op share no memory; those of one kernel may lie in one buffer.
    return [each if each.untyped_storage().nbytes() == each.nbytes else each.clone() for each in gradients]


def _gradient_shapes(
    dy: Tensor,
    kept: object,
    token: object,
    sources: object,
    size: list[int],
    stride: object,
    shapes: list[int],
    sinks: list[int],
    *_: object,
) -> list[Tensor]:
    """The results of `_gradients`, without values."""
    sizes = _sizes(size, shapes)
    return [dy.new_empty(each) for each, sink in zip(sizes, sinks, strict=True) if sink == AUTOGRAD]


def _sizes(size: Sequence[int], shapes: Sequence[int]) -> list[Sequence[int]]:
    """The sizes of x and of each operand. `shapes`: of each operand, the number of its sizes, then these."""
    sizes, at = [size], 0
    while at < len(shapes):
        sizes.append(shapes[at + 1 : at + 1 + shapes[at]])
        at += 1 + shapes[at]
    return sizes


_NAMED = "int[] held, Tensor[] handles, str names"
_OF_FORWARD = "Tensor[] kept, Tensor? token, Tensor?[] sources, SymInt[] size, SymInt[] stride, SymInt[] shapes"
_RUN = f"(Tensor x, Tensor?[] operands, {_NAMED}, bool[] sources, SymInt[] size, SymInt[] stride) -> Tensor[]"
_DIFFERENTIATE = f"(Tensor dy, {_OF_FORWARD}, int[] sinks, {_NAMED}) -> Tensor[]"
for _name, _tags in (("row", ()), ("stateful_row", STATEFUL)):
    define_op(f"{_name}{_RUN}", _run, _shapes, tags=_tags)
    define_op(f"{_name}_gradients{_DIFFERENTIATE}", _gradients, _gradient_shapes, tags=_tags)
define_op(f"storing_row_gradients{_DIFFERENTIATE}", _gradients, _gradient_shapes, tags=STATEFUL)
mark_effect("duotone::storing_row_gradients")  # a graph may need none of its outputs


class RowContext(FunctionCtx):
    """What the forward of a row saves for its backward."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    layout: tuple[Sequence[int], Sequence[int], list[int], list[int]]
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
            held.append(4 * len(of_operand) + how)
            parts += of_operand
            flags += [is_source] * len(of_operand)
        y, *kept = run(x, parts, held, row.handles, row.names, flags, x.shape, x.stride())
        shapes = [n for each in operands for n in ((0,) if each is None else (each.dim(), *each.shape))]
        ctx.layout, ctx.count, ctx.row = (x.shape, x.stride(), shapes, held), len(kept), row
        if row.recomputes:  # a partitioner keeps inputs of ops that fuse with nothing; a power of 1 fuses with x
            x = x.pow(1.0)
        sources = [each if is_source else None for each, is_source in zip((x, *parts), flags, strict=True)]
        saved = [None if each is None else as_of_now(each) for each in sources]
        ctx.save_for_backward(*kept, *saved)  # type: ignore[arg-type]  # None is allowed
        return y

    @staticmethod
    def backward(ctx: RowContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        row, (size, stride, shapes, held), needs = ctx.row, ctx.layout, ctx.needs_input_grad[1:]
        run = torch.ops.duotone.stateful_row_gradients if row.handles else torch.ops.duotone.row_gradients
        if max(row.sinks) > AUTOGRAD:
            run = torch.ops.duotone.storing_row_gradients
        kept, sources = [*ctx.saved_tensors[: ctx.count]], [*ctx.saved_tensors[ctx.count :]]
        token = kept.pop() if row.keeps else None
        sinks = [sink if need else 0 for sink, need in zip(row.sinks, (row.input_grad, *needs[1:]), strict=True)]
        results = iter(run(dy, kept, token, sources, size, stride, shapes, sinks, held, row.handles, row.names))
        gradients: list[Tensor | None] = []
        for sink, of_one in zip(sinks, _sizes(size, shapes), strict=True):
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
define_op(
    f"differentiable_row(Tensor x, Tensor?[] operands, Tensor[] handles, {_FLAGS}) -> Tensor", _run_row
)


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
