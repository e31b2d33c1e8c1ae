"""What inductor replaces in a graph: rows of pieces below one another. It changes only the speed."""

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.fx.node import map_arg

from duotone.numbered import constant_in_traces
from duotone.pipeline.row_call import PLAIN, RowCall

if TYPE_CHECKING:
    from torch._inductor.pattern_matcher import Match
    from torch.fx import Node

EAGER = "eager_input_vals"
"""Where inductor keeps the shapes and memory orders that the inputs of an op had in the trace."""


@constant_in_traces
def find_joined_weights() -> None:
    """Let inductor give rows the pieces of weights from now on, so that it copies none that lie side by side."""
    _register()


@functools.cache
def _register() -> None:
    from torch._inductor.fx_passes.post_grad import pass_patterns
    from torch._inductor.pattern_matcher import CallFunction, Ignored, register_graph_pattern

    for op in (torch.ops.duotone.row.default, torch.ops.duotone.stateful_row.default):
        pattern = CallFunction(op, *[Ignored() for _ in op._schema.arguments])
        register_graph_pattern(pattern, extra_check=_is_unchanged, pass_dict=pass_patterns[1])(_take_pieces)  # type: ignore[arg-type]


def _is_unchanged(match: "Match") -> bool:
    return min(_call(match).held, default=0) >= 0


def _call(match: "Match") -> "RowCall":
    return RowCall.of(match.output_node().args[3])  # type: ignore[arg-type]


def _take_pieces(match: "Match") -> None:
    """Give a row the matrices that a weight joins, unless backward reads it. Its code is minus their number."""
    node, call = match.output_node(), _call(match)
    x, operands, handles, _, symbols = cast("tuple[Any, list[Any], Any, Any, Any]", node.args)
    parts, codes = list[Any](), list[int]()
    of_operands, flags = iter([x, *operands]), iter(call.sources)
    for code in call.held:
        of_operand = [next(of_operands) for _ in range(code // PLAIN)]
        of_each = [next(flags) for _ in of_operand]
        pieces = _pieces(of_operand[0]) if codes and code == PLAIN and not any(of_each) else []
        parts += pieces or of_operand
        codes.append(-len(pieces) or code)
    node.args = x, parts[1:], handles, replace(call, held=tuple(codes)).text, symbols
    if EAGER in node.meta:
        node.meta[EAGER] = map_arg(node.args, lambda each: each.meta["val"]), {}  # type: ignore[arg-type]


def _pieces(node: object) -> "list[Node]":
    """The matrices of one dtype that a node puts one below the other; none for any other node."""
    if not isinstance(node, torch.fx.Node) or node.target is not torch.ops.aten.cat.default or len(node.args) != 1:
        return []
    pieces: list[Node] = node.args[0]  # type: ignore[assignment]
    values = [piece.meta["val"] for piece in pieces]
    return pieces if all(each.dim() == 2 and each.dtype is values[0].dtype for each in values) else []
