"""Linears over consecutive rows of one input, such as the experts of a mixture: the linear core with segments."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.dispatch import segments as native
from duotone.dispatch.rule import JoinedOperand, JoinedWeights, put
from duotone.dispatch.segment_products import SMALL
from duotone.linear.core import Item, LinearStage, Operands, as_matrix, with_lead
from duotone.linear.plan import LinearPlan
from duotone.linear.plane_source import ENCODE_NOW
from duotone.linear.row_counts import Rows, device_splits, host_splits
from duotone.linear.segment_operands import are_real, encode_segments, encode_weights, join, takes_segments
from duotone.linear.sink import GRADIENT, ToMainGrad
from duotone.pipeline.stage import Gradients, Needs, Saved, Stage
from duotone.sharding.layout import WHOLE
from duotone.tensor.plane import Plane

if TYPE_CHECKING:
    from duotone.kernels.segment_cast import Segments

RowCounts = tuple[int, ...]
Biases = Sequence[Tensor | None]
PER_LINEAR = 3
"""Things that a linear keeps for its backward."""


@dataclass(frozen=True, eq=False)
class GroupedStage(Stage):
    """x (*lead, K), rows of each linear (n,), seed or None, n weights (N, K), n biases (N,) or None -> (*lead, N).

    No block, scale or Hadamard group crosses two linears. The linears run one after the other or, with `is_joint`, by
    one cast for each operand and rules that multiply all segments. Codes and scales are the same bits.
    """

    linears: tuple[LinearStage, ...]
    is_joint: bool = False
    """Whether the linears run by one cast and joint rules, if the host knows the rows."""

    takes_device_splits: bool = False
    """Whether the rows of each linear may stay on the device, as int32 or int64 (n,)."""

    grouped: bool = False
    """Whether one product takes all segments even if the host knows their rows. Sums then run in another order."""

    why_apart: str = ""
    """Why each linear has a separate product, if they are not `grouped`."""

    row_part: str = ""
    has_owner: bool = False

    @staticmethod
    def of(linears: Sequence[LinearStage], shape: tuple[int, ...]) -> "GroupedStage":
        """The fastest stage for linears with weights (N, K) under one plan."""
        linears, plan = tuple(linears), linears[0].plan
        gemms = [gemm for gemm, need in zip(plan.gemms, (True, plan.input_grad, plan.weight_grad), strict=True) if need]
        refusals = [gemm.rule.refuse_segments(gemm.problem, shape) for gemm in gemms]
        if not _takes_segments(linears) or any(refusals):
            why = next(filter(None, refusals), "an option, a quantizer or a layout is for one expert at a time")
            return GroupedStage(linears, why_apart=why)
        at_once = not plan.weight_grad or not any(one.sink.waits for one in linears)
        on_device = at_once and all(gemm.rule.groups_segments(gemm.problem, len(linears)) for gemm in gemms)
        grouped = on_device and shape[0] * shape[1] <= SMALL
        is_joint = grouped or all(gemm.rule.separates_segments for gemm in gemms)
        why = "" if grouped else f"a weight has more than {SMALL} elements" if on_device else "no launch multiplies all"
        return GroupedStage(linears, is_joint, on_device, grouped, why if at_once else "weight gradients are put off")

    @property
    def arity(self) -> tuple[int, ...]:  # type: ignore[override]
        return (2 + 2 * len(self.linears),)

    @property
    def plan(self) -> LinearPlan:
        """The plan of each expert."""
        return self.linears[0].plan

    def in_rows(self, part: str) -> "GroupedStage":
        """In a trace: the stage of one module, under a name in rows."""
        options = self.is_joint, self.takes_device_splits, self.grouped, self.why_apart
        return GroupedStage(self.linears, *options, part, True)

    @property
    def waits(self) -> bool:  # type: ignore[override]
        return any(linear.waits for linear in self.linears)

    @property
    def stores(self) -> bool:  # type: ignore[override]
        return any(linear.stores for linear in self.linears)

    @property
    def name(self) -> str:
        """The name of the stage in graphs."""
        return self.linears[0].name

    @property
    def rolls_forward_alone(self) -> bool:
        return self.plan.rolls_forward_alone

    @property
    def refusal(self) -> str:  # type: ignore[override]
        return next((linear.refusal for linear in self.linears if linear.refusal), "")

    @property
    def reads(self) -> tuple[bool, ...]:  # type: ignore[override]
        x, weight, bias, _ = self.linears[0].reads
        return x, False, False, *[weight] * len(self.linears), *[bias] * len(self.linears)

    def replay(self, x: Tensor, operands: Sequence[Any], saved: Saved | None) -> tuple[Tensor, ...]:
        splits, _, weights, biases = self.named(operands)
        each = zip(torch.split(as_matrix(x), list(splits)), weights, biases, strict=True)
        return (with_lead(torch.cat([F.linear(*one) for one in each]), x),)

    def forward(self, x: Tensor, *operands: Any) -> tuple[Tensor, Saved]:
        splits, seed, weights, biases = self.named(operands)
        if isinstance(splits, Tensor):
            splits = self.counted(splits, x.shape[:-1].numel(), x.device.type)
        is_joint = self.is_joint or (self.takes_device_splits and isinstance(splits, Tensor))
        if is_joint and are_real(x, weights):
            return self._forward_joint(x, splits, weights, biases)
        if isinstance(splits, Tensor):
            count = len(self.linears)
            splits = host_splits(splits, count, None) if x.numel() else (0,) * count
        return self._forward_each(x, splits, seed, weights, biases)

    def counted(self, splits: Rows | Tensor | Sequence[int], rows: int | None, device: str) -> Tensor | RowCounts:
        """The rows of each linear, on the device if no host needs them. UserError unless they sum to `rows`."""
        stays, count = self.leaves_splits(device), len(self.linears)
        if isinstance(splits, Rows):
            fits = splits.experts == count and splits.total == rows
            splits = splits.counts if stays and fits and (self.grouped or not splits.waits) else splits.splits
        if isinstance(splits, Tensor) and splits.is_cuda and stays:
            return device_splits(splits, count)
        return host_splits(splits, count, rows)

    def leaves_splits(self, device: str) -> bool:
        """Whether row counts on the device stay there, so that the host does not wait."""
        return device == "cuda" and self.takes_device_splits

    def backward(self, dy: Tensor, saved: Saved, needs: Needs, *extra: Tensor) -> Gradients:
        *planes, ((splits, segments),) = saved
        if segments is None:
            return self._backward_each(dy, planes, splits, needs)
        return self._backward_joint(dy, planes, segments, needs)

    def named(self, operands: Sequence[Item]) -> tuple[Item, Item, Sequence[Item], Sequence[Item]]:
        """Like `LinearStage.named`."""
        splits, seed, *parameters = operands
        count = len(self.linears)
        return splits, seed, parameters[:count], parameters[count:]

    def ordered(self, operands: Operands[Item]) -> tuple[Item | None, ...]:
        """The inverse of `named`."""
        splits, seed, weights, biases = operands
        return splits, seed, *weights, *biases

    def _forward_each(
        self, x: Tensor, splits: RowCounts, seed: Tensor | None, weights: Sequence[Tensor], biases: Biases
    ) -> tuple[Tensor, Saved]:
        outputs: list[Tensor] = []
        saved: list[Any] = []
        each = zip(self.linears, torch.split(as_matrix(x), list(splits)), weights, biases, strict=True)
        for i, (linear, rows, weight, bias) in enumerate(each):
            first = None if seed is None else seed + i * self.plan.seeds
            y, (saved_here,), _ = linear.run(rows, (weight, bias, first))
            outputs.append(y)
            saved += saved_here
        return with_lead(torch.cat(outputs), x), (*saved, ((tuple([len(y) for y in outputs]), None),))

    def _backward_each(self, dy: Tensor, saved: Sequence[Any], splits: RowCounts, needs: Needs) -> Gradients:
        _, _, needs_weights, needs_biases = self.named(needs[1:])
        saved_of_each = zip(*[iter(saved)] * PER_LINEAR, strict=True)
        rows_of_each = torch.split(as_matrix(dy), list(splits))
        each = zip(self.linears, rows_of_each, saved_of_each, needs_weights, needs_biases, strict=True)
        gradients = [
            linear.backward(rows, saved_here, (needs[0], weight, bias, False))
            for linear, rows, saved_here, weight, bias in each
        ]
        dx, dw, db, _ = zip(*gradients, strict=True)
        return None if dx[0] is None else with_lead(torch.cat(dx), dy), None, None, *dw, *db

    def _forward_joint(
        self, x: Tensor, splits: RowCounts | Tensor, weights: Sequence[Tensor], biases: Biases
    ) -> tuple[Tensor, Saved]:
        plan, flat = self.plan, as_matrix(x).contiguous()
        segments = native.segments_of(splits, flat, self.grouped or isinstance(splits, Tensor))
        row, *saved_input = encode_segments(plan.input, flat, segments)
        weight, saved_weight = self._encode_weights(weights)
        for linear in self.linears:
            linear.sink.begin()
        assert row is not None
        y = plan.fprop.rule.run_segments(row, weight, segments, x.dtype, biases)
        return with_lead(y, x), (*saved_input, *saved_weight, ((None, segments),))

    def _encode_weights(self, weights: Sequence[Tensor]) -> tuple[JoinedWeights, Sequence[Tensor | None]]:
        """The rowwise operand, and the columnwise codes and scales: of all weights together, or of each cached one."""
        operand = self.plan.weight
        if operand.source is ENCODE_NOW:
            return encode_weights(operand, weights)
        pairs = zip(self.linears, weights, strict=True)
        rows, cols = zip(*[linear.plan.weight.encode(weight, None) for linear, weight in pairs], strict=True)
        saved = () if cols[0] is None else (*_codes(cols), *_scales(cols))
        return JoinedWeights(rows[0].format, _codes(rows), _scales(rows)), saved

    def _saved_weights(self, saved: Sequence[Tensor]) -> JoinedWeights:
        """The columnwise operand, from what `_encode_weights` returned for backward."""
        fmt, count = self.plan.dgrad.b, len(self.linears)
        if self.plan.weight.source is ENCODE_NOW:
            return JoinedWeights(*join(fmt, saved[0], saved[1]))
        return JoinedWeights(fmt, saved[:count], saved[count:])

    def _backward_joint(self, dy: Tensor, saved: Sequence[Tensor], segments: "Segments", needs: Needs) -> Gradients:
        plan, count = self.plan, len(self.linears)
        _, _, needs_weights, needs_biases = self.named(needs[1:])
        flat = as_matrix(dy).contiguous()
        row, col, col_scale = encode_segments(plan.gradient, flat, segments)
        dx, dw, db = None, [None] * count, [None] * count
        if plan.input_grad:
            assert row is not None
            weights, biases = self._saved_weights(saved[2:]), [None] * count
            dx = with_lead(plan.dgrad.rule.run_segments(row, weights, segments, dy.dtype, biases), dy)
        if plan.weight_grad:
            left, right = join(plan.wgrad.a, col, col_scale), join(plan.wgrad.b, saved[0], saved[1])
            row = col = None
            dw = self.weight_gradients(left, right, segments, flat, needs_weights)
        if any(needs_biases):
            db = _bias_gradients(flat, segments, needs_biases)
        return dx, None, None, *dw, *db

    def weight_gradients(
        self, dy: JoinedOperand, x: JoinedOperand, segments: "Segments", like: Tensor, needs: Sequence[bool]
    ) -> list[Tensor | None]:
        """The gradient that autograd gets for each weight, from columnwise codes and scales."""
        rule = self.plan.wgrad.rule
        sinks = [linear.sink for linear in self.linears]
        if not segments.grouped:
            products = rule.segment_products(dy, x, segments)
            each = zip(sinks, products, needs, strict=True)
            return [sink.take(product, like) if need else None for sink, product, need in each]
        if sinks[0] is GRADIENT:
            gradients = rule.contract_segments(dy, x, segments, like.dtype)
            return [dw if need else None for dw, need in zip(gradients, needs, strict=True)]
        mains = cast(list[ToMainGrad], sinks)
        places = [sink.place() if need else None for sink, need in zip(mains, needs, strict=True)]
        unplaced = rule.contract_segments_into(dy, x, segments, places)
        return [
            None if place is None else sink.filled(place[0]) if dw is None else sink.take(Computed(dw), like)
            for sink, place, dw in zip(mains, places, unplaced, strict=True)
        ]


class Computed(NamedTuple):
    """A weight gradient (N, K) that has been computed."""

    gradient: Tensor

    def compute(self, dtype: torch.dtype, operand_dtype: torch.dtype) -> Tensor:
        return self.gradient.to(dtype)

    def compute_into(self, out: Tensor, adds: bool, operand_dtype: torch.dtype) -> None:
        put(self.gradient, out, adds)


def _takes_segments(linears: Sequence[LinearStage]) -> bool:
    """Whether one cast encodes all segments of each operand, and nothing else happens to them."""
    plan = linears[0].plan
    joint = all(takes_segments(operand, plan.fprop.problem) for operand in plan.operands.values())
    return joint and plan.layout == WHOLE and all(type(one) is LinearStage for one in linears)


def _bias_gradients(dy: Tensor, segments: "Segments", needs: Sequence[bool]) -> list[Tensor | None]:
    if segments.grouped or segments.counts is None:
        sums: Sequence[Tensor] = native.row_sums(dy, segments).unbind(0)
        return [total if need else None for total, need in zip(sums, needs, strict=True)]
    return [
        rows.sum(0) if need else None for rows, need in zip(torch.split(dy, list(segments.counts)), needs, strict=True)
    ]


def _codes(planes: Sequence[Plane]) -> list[Tensor]:
    dtype = planes[0].format.code_dtype
    assert dtype is not None
    return [plane.parts["codes"].contiguous().view(dtype) for plane in planes]


def _scales(planes: Sequence[Plane]) -> list[Tensor]:
    """Flat, as `BlockSegmentCast` has them: those of lines next to each other."""
    scales = [plane.parts["scale"] for plane in planes]
    if planes[0].format.block.rows == 1:
        scales = [scale.t() for scale in scales]
    return [scale.reshape(-1) for scale in scales]
