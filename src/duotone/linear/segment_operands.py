"""Operands of linears over row segments: one cast encodes all segments, each under separate scales."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from duotone.dispatch.casts import has_casts, segment_cast
from duotone.dispatch.rule import GemmProblem, JoinedOperand, JoinedWeights
from duotone.dispatch.segments import are_real as segments_are_real
from duotone.dispatch.segments import equal_segments, table
from duotone.dispatch.stages import amax_of
from duotone.formats import Format
from duotone.formats.elements import block_amax
from duotone.linear.operand_plan import BACKWARD_OPERANDS, OperandPlan
from duotone.linear.plane_source import USE_HELD
from duotone.tensor import QuantizedTensor
from duotone.tensor.quantizer import Quantizer

if TYPE_CHECKING:
    from duotone.kernels.segment_cast import Coded, Segments, Table


def takes_segments(operand: OperandPlan, problem: GemmProblem) -> bool:
    """Whether one cast encodes row segments under separate scales, and backward reads the columnwise plane.

    The rule of a GEMM says whether it multiplies them (`GemmRule.refuse_segments`). Weights may have their planes.
    """
    quantizer = operand.quantizer
    encodes = operand.source.encodes or operand.source is USE_HELD
    plain = type(quantizer) is Quantizer and quantizer.columnwise_source == "original" and encodes
    has_cast = has_casts(quantizer.rowwise, quantizer.columnwise, problem.dtype, problem.target)
    return plain and operand.backward is BACKWARD_OPERANDS[None] and operand.context.shard is None and has_cast


def are_real(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether kernels take the tensors. Planes that FSDP2 gathers come and go, so a loop takes them one by one."""
    parts: list[Tensor] = []
    for weight in weights:
        if isinstance(weight, QuantizedTensor):
            plane = weight.planes.rowwise or weight.planes.columnwise
            if weight.gathers is not None or plane is None:
                return False
            weight = plane.parts["codes"]
        parts.append(weight)
    return segments_are_real(x, parts)


def encode_segments(
    operand: OperandPlan, x: Tensor, segments: "Segments"
) -> tuple[JoinedOperand | None, Tensor | None, Tensor | None]:
    """The rowwise operand of contiguous (M, K), and the columnwise codes and scales, which are kept as tensors."""
    row, _ = operand.formats
    coded = _cast(operand, x, segments, partial(segment_amaxes, x, segments))
    return None if row is None else join(row, coded.row, coded.row_scale), coded.col, coded.col_scale


def encode_weights(
    operand: OperandPlan, weights: Sequence[Tensor]
) -> tuple[JoinedWeights, tuple[Tensor | None, Tensor | None]]:
    """Like `encode_segments`, for tensors (N, K). Each is a segment; columnwise codes are (E, K, N)."""
    weights = [w if w.is_contiguous() else w.contiguous() for w in weights]
    first, count, (n, k) = weights[0], len(weights), weights[0].shape
    segments, (row, _) = equal_segments(n, count, first), operand.formats
    coded = _cast(operand, first, segments, partial(_amaxes, weights), table(weights))
    assert row is not None
    codes, scale = join(row, coded.row, coded.row_scale)[1:]
    joined = JoinedWeights(row, codes.view(count, n, k), scale.view(count, -1))
    if coded.col is None or coded.col_scale is None:
        return joined, (None, None)
    return joined, (coded.col.view(count, k, n), coded.col_scale.view(count, -1))


def _cast(
    operand: OperandPlan, x: Tensor, segments: "Segments", amaxes: Callable[[], Tensor], where: "Table | None" = None
) -> "Coded":
    (row, col), slots = operand.formats, operand.context.slots
    cast = segment_cast(row, col, x, operand.context.propagate)
    assert cast is not None
    slot = None
    if row is not None and row.is_delayed:
        slot = slots[0]
    elif col is not None and col.is_delayed:
        slot = slots[1] or slots[0]
    if slot is None:
        return cast(x, segments, (None, None, 0), where)
    scale, live = slot.place_each(x.device, segments.count, operand.slot_distance, amaxes)
    return cast(x, segments, (scale, live, operand.slot_distance), where)


def join(fmt: Format, codes: Tensor | None, scale: Tensor | None) -> JoinedOperand:
    """Codes as bytes and scales of all segments as an operand."""
    dtype = fmt.code_dtype
    assert dtype is not None and codes is not None and scale is not None
    return JoinedOperand(fmt, codes.view(dtype), scale)


def _amaxes(tensors: Sequence[Tensor]) -> Tensor:
    """fp32 (E,): the largest magnitude of each tensor, NaN ignored."""
    return torch.cat([amax_of(each) for each in tensors])


def segment_amaxes(x: Tensor, segments: "Segments") -> Tensor:
    """fp32 (E,): the largest magnitude in the rows (M, K) of each segment. Rows after the last one do not count."""
    rows = block_amax(x.view(x.shape[0], 1, 1, x.shape[1]))[:, 0]
    ends = segments.ends[: segments.count]
    owners = torch.bucketize(torch.arange(x.shape[0], device=x.device), ends, right=True)
    return rows.new_zeros(segments.count + 1).scatter_reduce(0, owners, rows, "amax")[:-1]
