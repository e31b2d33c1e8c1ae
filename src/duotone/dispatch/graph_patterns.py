"""Patterns that inductor looks for in a graph, to replace two ops by one. They change only the speed."""

import functools
import operator
from typing import TYPE_CHECKING

import torch
from torch.fx.node import map_arg

from duotone.numbered import constant_in_traces

if TYPE_CHECKING:
    from torch._inductor.pattern_matcher import Match
    from torch.fx import Node
    from torch.fx.node import Argument, Target

EAGER = "eager_input_vals"
"""Where inductor keeps the shapes and memory orders that the inputs of an op had in the trace."""


@constant_in_traces
def find_patterns() -> None:
    """Let inductor look for the patterns from now on."""
    _register()


@functools.cache
def _register() -> None:
    from torch._inductor.fx_passes.post_grad import pass_patterns
    from torch._inductor.pattern_matcher import MULTIPLE, CallFunction, Ignored, KeywordArg, register_graph_pattern

    def any_of(count: int) -> list[Ignored]:
        return [Ignored() for _ in range(count)]

    ops, aten = torch.ops.duotone, torch.ops.aten
    register = functools.partial(register_graph_pattern, pass_dict=pass_patterns[1])  # type: ignore[arg-type]
    dx = CallFunction(operator.getitem, CallFunction(ops.norm_gradients.default, *any_of(7), _users=MULTIPLE), 0)
    for terms in ((dx, KeywordArg("added")), (KeywordArg("added"), dx)):
        register(CallFunction(aten.add.Tensor, *terms), extra_check=_can_add)(_add)
    rows = CallFunction(aten.cat.default, KeywordArg("parts"))
    for op, counts in ((ops.cast_planes.default, (4, 5)), (ops.traced_planes.default, (8,))):
        for count in counts:
            register(CallFunction(op, rows, *any_of(count)), extra_check=_are_matrices)(_cast_rows)


def _norm_of(total: "Node", added: "Node") -> tuple["Node", "Node"]:
    """The gradient of a norm's input, which is one term of the sum, and the op that gives it."""
    a, b = total.args
    dx = a if b is added else b
    return dx, dx.args[0]  # type: ignore[union-attr,return-value]


def _can_add(match: "Match") -> bool:
    """Whether the other term exists before the gradient of the norm's input, and is a tensor like it."""
    added = match.kwargs["added"]
    if not isinstance(added, torch.fx.Node):
        return False
    dx, norm = _norm_of(match.output_node(), added)
    one, other = dx.meta["val"], added.meta["val"]
    alike = one.shape == other.shape and one.dtype is other.dtype and other.is_contiguous()
    is_plain = not match.output_node().kwargs  # the value of a factor, which patterns do not compare
    return is_plain and alike and added < norm and norm.args[6][0]  # type: ignore[index,no-any-return]


def _add(match: "Match", added: "Node") -> None:
    total = match.output_node()
    dx, norm = _norm_of(total, added)
    whole = _before(norm, norm.target, (*norm.args, added))
    norm.replace_all_uses_with(whole)
    total.replace_all_uses_with(dx)
    for node in (total, norm):
        match.graph.erase_node(node)


def _are_matrices(match: "Match") -> bool:
    """Whether the cast reads matrices that lie one below the other, and takes no scale from outside."""
    cast = match.output_node()
    has_scale = cast.target is torch.ops.duotone.cast_planes.default and cast.args[4] is not None
    if has_scale or any(node.kwargs for node in match.nodes):
        return False
    parts = [part.meta["val"] for part in match.kwargs["parts"]]
    return all(part.dim() == 2 and part.dtype is parts[0].dtype for part in parts)


def _cast_rows(match: "Match", parts: "list[Node]") -> None:
    cast = match.output_node()
    rows, *where, row, col, propagate = cast.args[:9] if len(cast.args) == 9 else cast.args[:4]
    matrix = "rows", parts, 0.0, row, col, propagate
    if where:
        planes = _before(cast, torch.ops.duotone.traced_produced.default, (*matrix, *where))
    else:
        planes = _before(cast, torch.ops.duotone.produced_planes.default, (*matrix, *cast.args[5:]))
    cast.replace_all_uses_with(planes)
    for node in (cast, rows):
        match.graph.erase_node(node)  # type: ignore[arg-type]


def _before(old: "Node", target: "Target", args: "tuple[Argument, ...]") -> "Node":
    """A call with the results of `old`, before it."""
    with old.graph.inserting_before(old):
        node = old.graph.call_function(target, args)  # type: ignore[arg-type]
    node.meta.update(old.meta)
    if EAGER in old.meta:
        node.meta[EAGER] = map_arg(args, lambda each: each.meta["val"]), {}
    return node
