"""Linears over row segments of one input, where native kernels take all segments at once: one cast for each operand.

Codes and scales are those of each linear alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from duotone.dispatch import segments as native
from duotone.dispatch.products import put
from duotone.linear.backward_operand import SOURCES
from duotone.linear.cache import Refreshed, Reused
from duotone.linear.core import LinearStage, as_matrix, with_lead
from duotone.linear.encoders import Cached, Encoder, Fresh
from duotone.linear.grouped import GroupedStage, host_splits
from duotone.linear.layout import WHOLE
from duotone.linear.plan import GemmPlan
from duotone.linear.plane_source import ENCODED
from duotone.linear.sink import GRADIENT
from duotone.pipeline.stage import Kept


@dataclass(frozen=True, eq=False)
class Apart:
    """A product for each linear, over as many rows as the host knows: results are those of separate linears."""

    counts: tuple[int, ...]
    segments: Any
    whole = False

    @classmethod
    def of(cls, splits: tuple[int, ...], x: Tensor) -> "Apart":
        return cls(splits, native.host_segments(splits, x))

    def over_rows(
        self, gemm: GemmPlan, left: Any, held: Fresh | Cached, right: Any, dtype: torch.dtype, biases: Sequence[Any]
    ) -> Tensor:
        """Codes and scales (M, K), and those that `held` made of each weight -> (M, N)."""
        (codes, scale), (weights, scales) = left, held.apart(*right)
        out = torch.empty((codes.shape[0], weights[0].shape[1]), dtype=dtype, device=codes.device)
        parts, outs = codes.view(gemm.a.code_dtype).split_with_sizes(self.counts), out.split_with_sizes(self.counts)
        fast = gemm.rule.fast  # type: ignore[attr-defined]
        of_parts = scale.unbind(0) if gemm.a.outer_block.rows != 1 else self._lines(scale)
        given = zip(self.counts, parts, weights, of_parts, scales, outs, biases, strict=True)
        for n, part, weight, of_part, of_weight, piece, bias in given:
            if n:
                native.product(part, weight, of_part, of_weight, fast, piece, bias)
        return out

    def _lines(self, scale: Tensor) -> list[Tensor]:
        """(n, 1) scales of the rows of each segment, which lie as columns of codes do."""
        wide = scale.unsqueeze(1).split_with_sizes([native.width(n) for n in self.counts])
        return [one if one.shape[0] == n else one[:n] for one, n in zip(wide, self.counts, strict=True)]

    def gradients(self, stage: "SegmentedStage", dy: Any, x: Any, like: Tensor, asked: Sequence[bool]) -> list[Any]:
        """What autograd is given for each weight, from columnwise codes and scales."""
        gemm, (n, k) = stage.plan.wgrad, stage.shape
        left, right = dy[0].view(gemm.a.code_dtype), x[0].view(gemm.b.code_dtype)
        if gemm.a.outer_block.rows == 1:
            scales = dy[1].unsqueeze(2).unbind(0), x[1].unsqueeze(1).unbind(0)
        else:
            scales = dy[1].unbind(0), x[1].unbind(0)
        made, start, fast = [], 0, gemm.rule.fast  # type: ignore[attr-defined]
        for linear, rows, of_dy, of_x, wanted in zip(stage.linears, self.counts, *scales, asked, strict=True):
            length = native.width(rows)
            if wanted:
                a = left.as_strided((n, length), (length, 1), n * start)
                b = right.as_strided((length, k), (1, length), k * start)
                made.append(linear.sink.take(Gradient(a, b, of_dy, of_x, fast), like))
            else:
                made.append(None)
            start += length
        return made

    def bias_gradients(self, dy: Tensor, asked: Sequence[bool]) -> list[Tensor | None]:
        return [rows.sum(0) if wanted else None for rows, wanted in zip(dy.split(self.counts), asked, strict=True)]


@dataclass(frozen=True, eq=False)
class Together:
    """One product for all linears, whether or not the host knows their rows: its sums run in an order of their own.

    Rows beyond the last segment are left as they come.
    """

    segments: Any
    whole = True

    @classmethod
    def of(cls, splits: tuple[int, ...] | Tensor, x: Tensor) -> "Together":
        if isinstance(splits, Tensor):
            return cls(native.device_segments(splits, x))
        return cls(native.host_segments(splits, x, native.CHUNK))

    def over_rows(
        self, gemm: GemmPlan, left: Any, held: Fresh | Cached, right: Any, dtype: torch.dtype, biases: Sequence[Any]
    ) -> Tensor:
        (codes, scale), (weights, scales) = left, [held.together(one) for one in right]
        codes, bias = codes.view(gemm.a.code_dtype), native.stacked(biases, weights.shape[1])
        return _grouped(gemm).of_rows(codes, weights, (scale, scales), self.segments, dtype, bias)

    def gradients(self, stage: "SegmentedStage", dy: Any, x: Any, like: Tensor, asked: Sequence[bool]) -> list[Any]:
        gemm = stage.plan.wgrad
        sinks: list[Any] = [linear.sink for linear in stage.linears]
        left, right = dy[0].view(gemm.a.code_dtype), x[0].view(gemm.b.code_dtype)
        multiply, given = _grouped(gemm), (left, right, (dy[1], x[1]), self.segments)
        if sinks[0] is GRADIENT:
            whole = multiply.of_columns(*given, like.dtype)
            return [made if wanted else None for made, wanted in zip(whole.unbind(0), asked, strict=True)]
        places = [sink.place() if wanted else None for sink, wanted in zip(sinks, asked, strict=True)]
        rest = native.columns_into(multiply, given, places)
        return [
            None if place is None else sink.filled(place[0]) if made is None else sink.take(Made(made), like)
            for sink, place, made in zip(sinks, places, rest, strict=True)
        ]

    def bias_gradients(self, dy: Tensor, asked: Sequence[bool]) -> list[Tensor | None]:
        sums = native.row_sums(dy, self.segments).unbind(0)
        return [made if wanted else None for made, wanted in zip(sums, asked, strict=True)]


def _grouped(gemm: GemmPlan) -> Any:
    return native.grouped_product(gemm.rule.fast, gemm.a.outer_block.rows == 1)  # type: ignore[attr-defined]


class Gradient(NamedTuple):
    """The product dw = dy^T x of one linear, (N, K), not yet computed: codes (N, M) and (M, K), and their scales."""

    dy: Tensor
    x: Tensor
    of_dy: Tensor
    of_x: Tensor
    fast: bool

    def compute(self, dtype: torch.dtype, operand_dtype: torch.dtype) -> Tensor:
        return native.product(*self, dtype=dtype)

    def compute_into(self, out: Tensor, adds: bool, operand_dtype: torch.dtype) -> None:
        native.product_into(*self, out, adds)


class Made(NamedTuple):
    """A weight gradient (N, K) that is there."""

    gradient: Tensor

    def compute(self, dtype: torch.dtype, operand_dtype: torch.dtype) -> Tensor:
        return self.gradient.to(dtype)

    def compute_into(self, out: Tensor, adds: bool, operand_dtype: torch.dtype) -> None:
        put(self.gradient, out, adds)


@dataclass(frozen=True, eq=False)
class SegmentedStage(GroupedStage):
    """As GroupedStage; the rows of each linear may be int32 or int64 (n,) on the device where `takes_device_splits`.

    Tensors without an address (fake, traced, subclasses) and inputs without rows take GroupedStage's own way.
    """

    shape: tuple[int, int]
    input: Encoder
    weight: Fresh | Cached
    gradient: Encoder
    takes_device_splits: bool = False
    on_host: type[Apart] | type[Together] = Apart
    """The products of rows that the host knows."""

    def forward(self, x: Tensor, *operands: Any) -> tuple[Any, ...]:
        splits, seed, *parameters = operands
        count, plan = len(self.linears), self.plan
        weights, biases = parameters[:count], parameters[count:]
        if not native.are_real(x, weights):
            if isinstance(splits, Tensor):
                splits = host_splits(splits, count, None) if x.numel() else (0,) * count
            return super().forward(x, splits, seed, *parameters)
        flat = as_matrix(x).contiguous()
        how: Any = Together if isinstance(splits, Tensor) else self.on_host
        products = how.of(splits, flat)
        coded = self.input.encode(flat, products)
        row, kept_w = self.weight.encode(weights, products)
        for linear in self.linears:
            linear.sink.begin()
        y = products.over_rows(plan.fprop, (coded.row, coded.row_scale), self.weight, row, x.dtype, biases)
        return with_lead(y, x), (coded.col, coded.col_scale, *kept_w, (products,))

    def backward(self, dy: Any, kept: Kept, needs: tuple[bool, ...], *extra: Any) -> tuple[Tensor | None, ...]:
        *tensors, (products,) = kept
        if not isinstance(products, Apart | Together):
            return super().backward(dy, kept, needs, *extra)
        plan, count = self.plan, len(self.linears)
        flat = as_matrix(dy).contiguous()
        coded = self.gradient.encode(flat, products)
        dx, dw, db = None, [None] * count, [None] * count
        if plan.input_grad:
            right, left = self.weight.restore(tensors[2:]), (coded.row, coded.row_scale)
            dx = products.over_rows(plan.dgrad, left, self.weight, right, dy.dtype, (None,) * count)
            dx = with_lead(dx, dy)
        if plan.weight_grad:
            left, right = (coded.col, coded.col_scale), (tensors[0], tensors[1])
            coded = None
            dw = products.gradients(self, left, right, flat, needs[3 : 3 + count])
        if any(needs[3 + count :]):
            db = products.bias_gradients(flat, needs[3 + count :])
        return dx, None, None, *dw, *db


def grouped_stage(linears: Sequence[LinearStage], shape: tuple[int, ...]) -> GroupedStage:
    """The stage of linears with weights (N, K) under one plan: the fastest that gives their results."""
    linears = tuple(linears)
    plan = linears[0].plan
    gemms = [plan.fprop, *([plan.dgrad] if plan.input_grad else []), *([plan.wgrad] if plan.weight_grad else [])]
    if not (_are_plain(linears) and native.takes_segments(gemms, shape)):
        return GroupedStage(linears)
    x = Encoder.of(plan.input, plan.input_usage, [one.plan.input_context for one in linears])
    w = Encoder.of(plan.weight, plan.weight_usage, [one.plan.weight_context for one in linears])
    dy = Encoder.of(plan.grad_output, plan.grad_usage, [one.plan.grad_context for one in linears])
    if x is None or w is None or dy is None:
        return GroupedStage(linears)
    at_once = not plan.weight_grad or not any(one.sink.waits for one in linears)
    on_device = at_once and native.takes_all_segments(len(linears))
    fresh, (n, k) = linears[0].weight_from is ENCODED, shape
    on_host = Together if on_device and fresh and n * k <= native.SMALL else Apart
    return SegmentedStage(linears, (n, k), x, Fresh(w) if fresh else Cached(linears), dy, on_device, on_host)


def _are_plain(linears: Sequence[LinearStage]) -> bool:
    """Whether the linears do no more than encode, multiply and keep columnwise planes."""
    plan = linears[0].plan
    same = plan.source is plan.input_source is SOURCES[None] and plan.layout == WHOLE
    encoded = plan.input_from is plan.gradient_from is ENCODED
    froms = [one.weight_from for one in linears]
    weights = all(one is ENCODED for one in froms) or all(isinstance(one, Refreshed | Reused) for one in froms)
    return same and encoded and weights and all(type(one) is LinearStage for one in linears)
