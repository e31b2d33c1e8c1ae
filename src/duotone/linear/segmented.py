"""Linears over row segments of one input whose rules multiply all segments at once: one cast for each operand.

Codes and scales are those of each linear alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from duotone.dispatch import segments as native
from duotone.dispatch.products import put
from duotone.dispatch.rule import JoinedOperand
from duotone.dispatch.segment_products import SMALL
from duotone.linear.backward_operand import BACKWARD_OPERANDS
from duotone.linear.cache import Refreshed, Reused
from duotone.linear.core import LinearStage, as_matrix, with_lead
from duotone.linear.encoders import Cached, Encoder, Fresh, joined
from duotone.linear.grouped import GroupedStage, host_splits
from duotone.linear.layout import WHOLE
from duotone.linear.plane_source import ENCODE_NOW
from duotone.linear.sink import GRADIENT
from duotone.pipeline.stage import Kept

if TYPE_CHECKING:
    from duotone.kernels.segment_cast import Segments


class Computed(NamedTuple):
    """A weight gradient (N, K) that is computed already."""

    gradient: Tensor

    def compute(self, dtype: torch.dtype, operand_dtype: torch.dtype) -> Tensor:
        return self.gradient.to(dtype)

    def compute_into(self, out: Tensor, adds: bool, operand_dtype: torch.dtype) -> None:
        put(self.gradient, out, adds)


@dataclass(frozen=True, eq=False)
class SegmentedStage(GroupedStage):
    """As GroupedStage; the rows of each linear may be int32 or int64 (n,) on the device where `takes_device_splits`.

    Tensors without an address (fake, traced, subclasses) and inputs without rows go through GroupedStage.
    """

    shape: tuple[int, int]
    input: Encoder
    weight: Fresh | Cached
    gradient: Encoder
    takes_device_splits: bool = False
    grouped: bool = False
    """Whether one product takes all segments where the host knows their rows, too. Sums then run in another order."""

    def forward(self, x: Tensor, *operands: Any) -> tuple[Any, ...]:
        splits, seed, *parameters = operands
        count, plan = len(self.linears), self.plan
        weights, biases = parameters[:count], parameters[count:]
        on_device = isinstance(splits, Tensor)
        if not native.are_real(x, weights):
            if on_device:
                splits = host_splits(splits, count, None) if x.numel() else (0,) * count
            return super().forward(x, splits, seed, *parameters)
        flat = as_matrix(x).contiguous()
        segments = native.segments_of(splits, flat, self.grouped or on_device)
        row, col, col_scale = self.input.encode(flat, segments)
        weight, kept_w = self.weight.encode(weights)
        for linear in self.linears:
            linear.sink.begin()
        assert row is not None
        y = plan.fprop.rule.run_segments(row, weight, segments, x.dtype, biases)
        return with_lead(y, x), (col, col_scale, *kept_w, (segments,))

    def backward(self, dy: Any, kept: Kept, needs: tuple[bool, ...], *extra: Any) -> tuple[Tensor | None, ...]:
        *tensors, (segments,) = kept
        if type(segments) is tuple:  # the splits of GroupedStage
            return super().backward(dy, kept, needs, *extra)
        plan, count = self.plan, len(self.linears)
        flat = as_matrix(dy).contiguous()
        row, col, col_scale = self.gradient.encode(flat, segments)
        dx, dw, db = None, [None] * count, [None] * count
        if plan.input_grad:
            weight = self.weight.restore(tensors[2:])
            assert row is not None
            dx = plan.dgrad.rule.run_segments(row, weight, segments, dy.dtype, (None,) * count)
            dx = with_lead(dx, dy)
        if plan.weight_grad:
            left, right = joined(plan.wgrad.a, col, col_scale), joined(plan.wgrad.b, tensors[0], tensors[1])
            row = col = None
            dw = self.weight_gradients(left, right, segments, flat, needs[3 : 3 + count])
        if any(needs[3 + count :]):
            db = _bias_gradients(flat, segments, needs[3 + count :])
        return dx, None, None, *dw, *db

    def weight_gradients(
        self, dy: JoinedOperand, x: JoinedOperand, segments: "Segments", like: Tensor, asked: Sequence[bool]
    ) -> list[Tensor | None]:
        """What autograd is given for each weight, from columnwise codes and scales."""
        rule = self.plan.wgrad.rule
        sinks: list[Any] = [linear.sink for linear in self.linears]
        if not segments.grouped:
            products = rule.segment_products(dy, x, segments)
            each = zip(sinks, products, asked, strict=True)
            return [sink.take(product, like) if wanted else None for sink, product, wanted in each]
        if sinks[0] is GRADIENT:
            gradients = rule.contract_segments(dy, x, segments, like.dtype)
            return [dw if wanted else None for dw, wanted in zip(gradients, asked, strict=True)]
        places = [sink.place() if wanted else None for sink, wanted in zip(sinks, asked, strict=True)]
        rest = rule.contract_segments_into(dy, x, segments, places)
        return [
            None if place is None else sink.filled(place[0]) if dw is None else sink.take(Computed(dw), like)
            for sink, place, dw in zip(sinks, places, rest, strict=True)
        ]


def _bias_gradients(dy: Tensor, segments: "Segments", asked: Sequence[bool]) -> list[Tensor | None]:
    if segments.grouped or segments.counts is None:
        sums = native.row_sums(dy, segments).unbind(0)
        return [total if wanted else None for total, wanted in zip(sums, asked, strict=True)]
    return [rows.sum(0) if wanted else None for rows, wanted in zip(dy.split(segments.counts), asked, strict=True)]


def grouped_stage(linears: Sequence[LinearStage], shape: tuple[int, ...]) -> GroupedStage:
    """The stage of linears with weights (N, K) under one plan: the fastest that gives their results."""
    linears = tuple(linears)
    plan = linears[0].plan
    gemms = [plan.fprop, *([plan.dgrad] if plan.input_grad else []), *([plan.wgrad] if plan.weight_grad else [])]
    if not _are_plain(linears) or any(gemm.rule.refuse_segments(gemm.problem, shape) for gemm in gemms):
        return GroupedStage(linears)
    x = Encoder.of([one.plan.input for one in linears])
    w = Encoder.of([one.plan.weight for one in linears])
    dy = Encoder.of([one.plan.gradient for one in linears])
    if x is None or w is None or dy is None:
        return GroupedStage(linears)
    at_once = not plan.weight_grad or not any(one.sink.waits for one in linears)
    on_device = at_once and all(gemm.rule.groups_segments(gemm.problem, len(linears)) for gemm in gemms)
    fresh, (n, k) = linears[0].plan.weight.source is ENCODE_NOW, shape
    grouped = on_device and fresh and n * k <= SMALL
    return SegmentedStage(linears, (n, k), x, Fresh(w) if fresh else Cached(linears), dy, on_device, grouped)


def _are_plain(linears: Sequence[LinearStage]) -> bool:
    """Whether the linears do no more than encode, multiply and keep columnwise planes."""
    plan = linears[0].plan
    same = plan.weight.backward is plan.input.backward is BACKWARD_OPERANDS[None] and plan.layout == WHOLE
    encoded = plan.input.source is plan.gradient.source is ENCODE_NOW
    sources = [one.plan.weight.source for one in linears]
    weights = all(one is ENCODE_NOW for one in sources) or all(isinstance(one, Refreshed | Reused) for one in sources)
    return same and encoded and weights and all(type(one) is LinearStage for one in linears)
