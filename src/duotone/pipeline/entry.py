"""The door of compiled code: stages of a graph are one op forward and one op backward, which run what eager code runs.

A graph names its stages and holds no plan. What only one module has, such as its delayed scales, it finds by a handle.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from duotone.allocate import rows_below
from duotone.dispatch.graph_patterns import PLAIN
from duotone.errors import UserError
from duotone.graph_ops import STATEFUL, define_op
from duotone.pipeline.rows import MOST, SEPARATOR, flat, remember, row_for_shapes, row_of
from duotone.pipeline.stage import Needs, RowPart, Saved, Stage, Stages
from duotone.state.rolling import roll_after
from duotone.state.torch_private import constants_allowed
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
    with constants_allowed(x):
        return row_for_shapes(names).forward([x, *whole], (codes, sources))[0]


def _gradients(  # noqa: PLR0913 (the arguments of the op)
    dy: Tensor,
    kept: list[Tensor],
    sources: list[Any],
    size: list[int],
    stride: list[int],
    shapes: list[int],
    needs: list[bool],
    held: list[int],
    handles: list[Tensor],
    names: str,
) -> list[Tensor]:
    row, structures = row_of(names, handles)
    structure = structures.get((names, tuple(size), tuple(stride), tuple(held)))
    if structure is None:
        raise UserError(f"more than {MOST} sizes of inputs came between a compiled forward and its backward")
    if row.rolls:
        roll_after(dy)
    given, shells = [dy, *structure.saved([*sources, *kept])], structure.shells_over(sources)
    results = row.backward(given, (shells, tuple(needs)), tuple(needs))
    given = [each.to(dy.dtype).contiguous() for each, need in zip(results, needs, strict=True) if need]  # as autograd
    return [each if each.untyped_storage().nbytes() == each.nbytes else each.clone() for each in given]


def _gradient_shapes(
    dy: Tensor,
    kept: object,
    sources: object,
    size: list[int],
    stride: object,
    shapes: list[int],
    needs: list[bool],
    *_: object,
) -> list[Tensor]:
    """The results of `_gradients`, without values. `shapes`: of each operand, the number of its sizes, then these."""
    sizes, at = [size], 0
    while at < len(shapes):
        sizes.append(shapes[at + 1 : at + 1 + shapes[at]])
        at += 1 + shapes[at]
    return [dy.new_empty(each) for each, need in zip(sizes, needs, strict=True) if need]


_NAMED = "int[] held, Tensor[] handles, str names"
_OF_FORWARD = "Tensor[] kept, Tensor?[] sources, SymInt[] size, SymInt[] stride, SymInt[] shapes"
_RUN = f"(Tensor x, Tensor?[] operands, {_NAMED}, bool[] sources, SymInt[] size, SymInt[] stride) -> Tensor[]"
_DIFFERENTIATE = f"(Tensor dy, {_OF_FORWARD}, bool[] needs, {_NAMED}) -> Tensor[]"
for _name, _tags in (("row", ()), ("stateful_row", STATEFUL)):
    define_op(f"{_name}{_RUN}", _run, _shapes, tags=_tags)
    define_op(f"{_name}_gradients{_DIFFERENTIATE}", _gradients, _gradient_shapes, tags=_tags)


@dataclass(frozen=True, eq=False)
class RowStage(Stage):
    """Neighbouring stages of a trace, as one op forward and one backward.

    `sources` says of x and each operand whether backward reads it as it is. `input_grad`: whether x gets a gradient.
    `recomputes`: a partitioner may compute x again instead of keeping it.
    """

    names: str
    handles: tuple[Tensor, ...]
    sources: tuple[bool, ...]
    input_grad: bool
    recomputes: bool
    recorded: tuple[tuple[Tensor, str] | None, ...]
    """Of each operand: the handle and the name of the stage that records its amaxes."""
    arity: tuple[int, ...]  # type: ignore[misc]

    refusal = "compiled, it is one op"

    def run(self, x: Tensor, operands: Sequence[Any]) -> tuple[Tensor, Sequence[Saved], Sequence[Tensor]]:
        run = torch.ops.duotone.stateful_row if self.handles else torch.ops.duotone.row
        shapes: list[int] = []
        held: list[int] = []
        parts: list[Tensor | None] = []
        flags = [self.sources[0]]
        for operand, is_source, recorded in zip(operands, self.sources[1:], self.recorded, strict=True):
            shapes += [0] if operand is None else [operand.dim(), *operand.shape]
            of_operand, how = flat(operand)
            if recorded is not None:
                assert isinstance(operand, QuantizedTensor) and operand.planes.rowwise is not None
                at = operand.planes.rowwise.format.part_names.index("scale")
                of_operand[at] = torch.ops.duotone.traced_recorded(of_operand[at], *recorded, 0)
            held.append(4 * len(of_operand) + how)
            parts += of_operand
            flags += [is_source] * len(of_operand)
        layout = x.shape, x.stride()
        y, *kept = run(x, parts, held, self.handles, self.names, flags, *layout)
        if self.recomputes:  # a partitioner keeps inputs of ops that fuse with nothing; a power of 1 fuses with x
            x = x.pow(1.0)
        sources = [each for each, is_source in zip((x, *parts), flags, strict=True) if is_source]
        saved = ((*layout, shapes, held, flags, len(kept)),), *kept, *sources
        return y, (saved, *[()] * (len(self.arity) - 1)), ()

    def run_backward(
        self, dy: Tensor, saved: Sequence[Saved], needs: Needs, extra: Sequence[Tensor]
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        ((size, stride, shapes, held, flags, count),), *tensors = saved[0]
        sources = iter(tensors[count:])
        sources = [next(sources) if is_source else None for is_source in flags]
        run = torch.ops.duotone.stateful_row_gradients if self.handles else torch.ops.duotone.row_gradients
        wanted = [self.input_grad, *needs]
        results = iter(run(dy, tensors[:count], sources, size, stride, shapes, wanted, held, self.handles, self.names))
        dx, *gradients = [next(results) if want else None for want in wanted]
        return dx, gradients


def in_rows(stages: Stages) -> Stages:
    """In a trace: the stages, with a row in the place of each run of neighbours that a row can hold."""
    if torch.compiler._is_exporting_flag:  # a program has the operations of the stages
        return tuple([stage.in_graph() for stage in stages])
    rewritten: list[Stage] = []
    run: list[tuple[Stage, RowPart]] = []
    for stage in (*stages, None):
        part = None if stage is None else stage.row_part
        if part is not None and stage is not None:
            run.append((stage, part))
            continue
        if any(each.is_quantized for _, each in run):
            rewritten.append(_joined([one for one, _ in run], [each for _, each in run]))
        else:
            rewritten += [one.in_graph() for one, _ in run]
        run = []
        if stage is not None:
            rewritten.append(stage.in_graph())
    return tuple(rewritten)


def _joined(stages: Sequence[Stage], parts: Sequence[RowPart]) -> RowStage:
    handles, arity, of_operands, recorded = (), (), (), ()
    for stage, part in zip(stages, parts, strict=True):
        handles, arity, of_operands = handles + part.handles, arity + stage.arity, of_operands + part.sources[1:]
        of_weight = (part.handles[0], part.name.split("@")[0]) if part.records else None
        recorded += (of_weight, *[None] * (len(part.sources) - 2)) if len(part.sources) > 1 else ()
    names = SEPARATOR.join([part.name for part in parts])
    return RowStage(
        names, handles, (parts[0].sources[0], *of_operands), parts[0].input_grad, parts[0].recomputes, recorded, arity
    )
