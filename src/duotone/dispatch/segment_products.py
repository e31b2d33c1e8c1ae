"""FP8 products by cuBLAS: the operands that it takes, and the products of all row segments of a matrix."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from duotone.dispatch.casts import DTYPES, PLAIN_TYPES, has_kernels
from duotone.dispatch.rule import GemmProblem, GemmRule, JoinedOperand, JoinedWeights, Place, put
from duotone.dispatch.segments import MOST, scattered, table, width
from duotone.dispatch.target import HOPPER, cuda_target, scales_rows_to_fp32
from duotone.formats import ROW, TENSOR

if TYPE_CHECKING:
    from duotone.kernels.grouped import GroupedProduct
    from duotone.kernels.segment_cast import Segments


STEP = 16
"""cuBLAS wants the contraction and the rows of the second operand to be multiples of this."""


def dtype_of_product(dtype: torch.dtype, per_row: bool, rows_to_fp32: bool) -> torch.dtype:
    """The dtype in which torch gives an FP8 product whose result is `dtype`: bf16 or fp32.

    `rows_to_fp32` as of `Target.scales_rows_to_fp32`.
    """
    if dtype is torch.bfloat16 or (per_row and not rows_to_fp32):
        return torch.bfloat16
    return torch.float32


def cublas_writes(codes: Tensor, out: Tensor) -> bool:
    """Whether cuBLASLt writes a product of such codes over `out` (M, N), or adds it."""
    if not has_kernels(out) or out.device != codes.device or not _calls_cublas(out.get_device()):
        return False
    placed = out.stride() == (out.shape[1], 1) and out.data_ptr() % STEP == 0
    return placed and out.dtype in (torch.float32, torch.bfloat16) and not out.shape[1] % STEP


@functools.cache
def _calls_cublas(index: int) -> bool:
    """Only checked on Hopper."""
    if cuda_target(index).arch != HOPPER:
        return False
    from duotone.kernels.cublas import library

    return library() is not None


SMALL = 1 << 24
"""Weights of at most so many elements are multiplied in one launch even if the host knows the rows. One launch for all
segments is then worth more than cuBLAS's faster slow accumulation. Measured, see docs/hopper.md."""


def product(
    left: Tensor,
    right: Tensor,
    of_left: Tensor,
    of_right: Tensor,
    fast: bool,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """FP8 codes (M, K) and (K, N), contraction next to each other, as `ScaledProduct` multiplies them.

    Into `out` (M, N) or a new one in `dtype`. Scales are both of one element, or (M, 1) and (1, N).
    """
    dtype = out.dtype if out is not None else dtype
    assert dtype is not None
    if not left.shape[1]:
        return torch.zeros((left.shape[0], right.shape[1]), dtype=dtype, device=left.device)
    per_row = of_left.numel() > 1 or of_right.numel() > 1
    to_fp32 = scales_rows_to_fp32(left.get_device())
    if dtype_of_product(dtype, per_row, to_fp32) is not dtype or not (
        bias is None or dtype is bias.dtype is torch.bfloat16
    ):
        wide = dtype_of_product(torch.float32, per_row, to_fp32)
        y = torch._scaled_mm(  # type: ignore[reportPrivateImportUsage]
            left, right, of_left, of_right, out_dtype=wide, use_fast_accum=fast
        )
        y = y if bias is None else y + bias.to(torch.float32)
        return y.to(dtype) if out is None else out.copy_(y)
    into = {} if out is None else {"out": out}
    return torch._scaled_mm(  # type: ignore[reportPrivateImportUsage]
        left, right, of_left, of_right, bias=bias, out_dtype=dtype, use_fast_accum=fast, **into
    )


class SegmentProduct(NamedTuple):
    """The product of one segment, not yet computed: codes (M, K) and (K, N), their scales, the accumulation."""

    left: Tensor
    right: Tensor
    of_left: Tensor
    of_right: Tensor
    fast: bool

    def compute(self, dtype: torch.dtype, operand_dtype: torch.dtype) -> Tensor:
        """(M, N) in `dtype`."""
        return product(*self, dtype=dtype)

    def compute_into(self, out: Tensor, adds: bool, operand_dtype: torch.dtype) -> None:
        """Written over `out` (M, N) in any of torch's dtypes or, `adds`, added to it."""
        left, right, of_left, of_right, fast = self
        if left.shape[1] and cublas_writes(left, out):
            from duotone.kernels.cublas import Side, multiply

            kind = TENSOR if of_left.numel() == of_right.numel() == 1 else ROW
            if multiply(Side(left, of_left, kind), Side(right.t(), of_right, kind), out, fast, adds):
                return
        y = product(*self, dtype=out.dtype if out.dtype in DTYPES else torch.float32)
        put(y, out, adds)


def rows_of_each(
    a: JoinedOperand,
    b: JoinedWeights,
    segments: "Segments",
    fast: bool,
    dtype: torch.dtype,
    biases: Sequence[Tensor | None],
) -> Tensor:
    """(M, K) by (N, K) of each segment -> (M, N): a product by cuBLAS for each segment that has rows."""
    codes, (weights, of_weights), counts = a.codes, b.unbound(), segments.counts
    assert counts is not None
    out = torch.empty((codes.shape[0], weights[0].shape[1]), dtype=dtype, device=codes.device)
    parts, outs = codes.split_with_sizes(counts), out.split_with_sizes(counts)
    of_parts = _lines(a.scale, counts) if a.has_lines else a.scale.unbind(0)
    each = zip(counts, parts, weights, of_parts, of_weights, outs, biases, strict=True)
    for n, part, weight, of_part, of_weight, piece, bias in each:
        if n:
            product(part, weight, of_part, of_weight, fast, piece, bias)
    return out


def _lines(scale: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """(n, 1) scales of the rows of each segment. In `scale` they are padded like the columns of codes."""
    wide = scale.unsqueeze(1).split_with_sizes([width(n) for n in counts])
    return [one if one.shape[0] == n else one[:n] for one, n in zip(wide, counts, strict=True)]


def columns_of_each(a: JoinedOperand, b: JoinedOperand, segments: "Segments", fast: bool) -> list[SegmentProduct]:
    """The products of columnwise codes (N, rows) and (K, rows) of each segment, not yet computed."""
    assert segments.counts is not None
    left, right = a.codes, b.codes
    n, k = left.numel() // segments.width, right.numel() // segments.width
    if a.has_lines:
        scales = a.scale.unsqueeze(2).unbind(0), b.scale.unsqueeze(1).unbind(0)
    else:
        scales = a.scale.unbind(0), b.scale.unbind(0)
    products: list[SegmentProduct] = []
    start = 0
    for rows, of_a, of_b in zip(segments.counts, *scales, strict=True):
        length = width(rows)
        one = left.as_strided((n, length), (length, 1), n * start)
        other = right.as_strided((length, k), (1, length), k * start)
        products.append(SegmentProduct(one, other, of_a, of_b, fast))
        start += length
    return products


def columns_into(
    a: JoinedOperand, b: JoinedOperand, segments: "Segments", fast: bool, places: Sequence[Place | None]
) -> list[Tensor | None]:
    """The columnwise products of all segments by one kernel. Each is written to its place, or added to it.

    None if a product was written to its place, or has none. Else the product (M, N): the kernel could not write
    there, or two segments share the place.
    """
    dtypes = [place[0].dtype for place in places if place is not None]
    dtype = torch.float32 if torch.float32 in dtypes else next((one for one in dtypes if one in DTYPES), torch.float32)
    first: dict[int, int] = {}
    for i, place in enumerate(places):
        if place is not None and _takes(a.codes, place[0], dtype):
            first.setdefault(place[0].data_ptr(), i)
    multiply, operands = grouped_product(fast, a, b), (a.codes, b.codes, (a.scale, b.scale), segments)
    if not first:
        products = multiply.of_columns(*operands, torch.float32).unbind(0)
        return [None if place is None else y for y, place in zip(products, places, strict=True)]
    direct = {i: places[i] for i in first.values()}
    new = functools.partial(torch.empty, a.codes.shape[0], b.codes.shape[0], dtype=dtype, device=a.codes.device)
    scratch = new() if None in places else None  # for all without a place
    adds = any(place[1] for place in direct.values() if place is not None)
    outs: list[Tensor] = []
    for i, place in enumerate(places):
        if place is None:
            assert scratch is not None
            outs.append(scratch)
        else:
            out, add = place if i in direct else (new(), False)
            outs.append(out if add or not adds else out.zero_())
    multiply.of_columns_into(*operands, outs[0], table(outs), adds)
    return [None if i in direct or place is None else outs[i] for i, place in enumerate(places)]


def _takes(like: Tensor, out: Tensor, dtype: torch.dtype) -> bool:
    """Whether the grouped product of operands like this one writes over a result (M, N) in `dtype`, or adds to it."""
    return out.dtype is dtype and out.device == like.device and out.is_contiguous() and type(out) in PLAIN_TYPES


def stacked(biases: Sequence[Tensor | None], length: int) -> Tensor | None:
    """(E, N) of all biases (N,), zeros where one is None; None if all are."""
    like = next((bias for bias in biases if bias is not None), None)
    if like is None:
        return None
    return torch.stack([like.new_zeros(length) if bias is None else bias for bias in biases])


def grouped_product(fast: bool, a: JoinedOperand, b: JoinedOperand | JoinedWeights) -> "GroupedProduct":
    """The kernel for operands with scales per segment, per row or per block of 128."""
    return _grouped_product(fast, a.format.block.rows, bool(a.format.block.cols), b.format.block.rows > 1)


@functools.cache
def _grouped_product(fast: bool, lines: int, blocks: bool, square: bool) -> "GroupedProduct":
    from duotone.kernels.grouped import GroupedProduct

    return GroupedProduct.of_blocks(square) if blocks else GroupedProduct(fast, lines)


class GroupedRule(GemmRule):
    """A rule whose operands one kernel multiplies for all segments."""

    fast = False

    def groups_segments(self, problem: GemmProblem, count: int) -> bool:
        return problem.target.arch == HOPPER and count <= MOST  # only checked on Hopper

    def run_segments(
        self,
        a: JoinedOperand,
        b: JoinedWeights,
        segments: "Segments",
        out_dtype: torch.dtype,
        biases: Sequence[Tensor | None],
    ) -> Tensor:
        codes, scale, multiply = b.codes, b.scale, grouped_product(self.fast, a, b)
        apart = None if isinstance(codes, Tensor) or isinstance(scale, Tensor) else scattered(codes, scale)
        weights, scales = b.stacked() if apart is None else (apart, scale[0].unsqueeze(0))
        bias = stacked(biases, (codes if isinstance(codes, Tensor) else codes[0]).shape[-2])
        return multiply.of_rows(a.codes, weights, (a.scale, scales), segments, out_dtype, bias)

    def contract_segments(
        self, a: JoinedOperand, b: JoinedOperand, segments: "Segments", dtype: torch.dtype
    ) -> Sequence[Tensor]:
        multiply = grouped_product(self.fast, a, b)
        return multiply.of_columns(a.codes, b.codes, (a.scale, b.scale), segments, dtype).unbind(0)

    def contract_segments_into(
        self, a: JoinedOperand, b: JoinedOperand, segments: "Segments", places: Sequence[Place | None]
    ) -> list[Tensor | None]:
        return columns_into(a, b, segments, self.fast, places)
