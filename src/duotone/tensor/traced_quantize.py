"""quantize in a compiled function: one call of the graph, because Dynamo cannot construct a wrapper subclass."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from duotone.comm import ShardContext
from duotone.errors import MissingPlaneError
from duotone.formats import get
from duotone.tensor.context import QuantizeContext
from duotone.tensor.graph_casts import delayed_scales, fixed
from duotone.tensor.history import History
from duotone.tensor.plane import Usage
from duotone.tensor.quantized import QuantizedTensor
from duotone.tensor.quantizer import Quantizer

HISTORY_FIELDS = tuple(field.name for field in dataclasses.fields(History))


def quantize_traced(quantizer: Quantizer, x: Tensor, usage: Usage, ctx: QuantizeContext) -> QuantizedTensor:
    """`Quantizer.quantize` in traced code. Only tensors, names and numbers go into the graph."""
    row, col, history = quantizer.rowwise, quantizer.columnwise, quantizer.history
    names = "" if row is None else row.name, "" if col is None else col.name
    fields: tuple[object, ...] | None = None
    if history is not None:
        if callable(history.amax_compute_algo) or history.scaling_factor_compute_algo is not None:
            raise MissingPlaneError("a history with functions of its own stays out of compiled code; quantize outside")
        fields = tuple([getattr(history, name) for name in HISTORY_FIELDS])
    of_row, of_col = delayed_scales(quantizer, x, usage, ctx)
    shard = None if ctx.shard is None else (ctx.shard.group, ctx.shard.dim)
    value = (*names, quantizer.columnwise_source, fields, ctx.propagate)
    return _quantize(x, of_row, of_col, ctx.seed, value, (usage.rowwise, usage.columnwise), shard)


@torch.compiler.allow_in_graph
def _quantize(
    x: Tensor,
    of_row: Tensor | None,
    of_col: Tensor | None,
    seed: Tensor | None,
    value: tuple[Any, ...],
    usage: tuple[bool, bool],
    shard: tuple[str, int] | None,
) -> QuantizedTensor:
    row, col, source, history, propagate = value
    quantizer = Quantizer((row and get(row)) or None, (col and get(col)) or None, source, history and History(*history))
    ctx = QuantizeContext(shard and ShardContext(*shard), fixed(of_row, of_col), seed, propagate=propagate)
    return quantizer.quantized(x, Usage(*usage), ctx)
