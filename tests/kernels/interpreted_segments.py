"""Checks: the cast of segments, against the plain stages over each segment, and grouped products."""

import itertools
import math
from typing import Any

import numpy as np
import torch
from interpreting import Check, awkward
from torch import Tensor

from duotone import formats
from duotone.dispatch.casts import _spec
from duotone.kernels import grouped
from duotone.kernels.cast import Cast
from duotone.kernels.segment_blocks import BlockSegmentCast
from duotone.kernels.segment_cast import Coded, SegmentCast, Segments, Table, segments_of
from duotone.tensor import Quantizer
from duotone.tensor.context import QuantizeContext, Slot
from duotone.tensor.plane import Usage

K = 144
SPLITS = [[70], [17, 0, 40, 13], [0, 0, 3, 0, 67, 0], [64, 6], [16, 32, 22], [0]]
PAIRS = [
    ("fp8_e4m3_tensor", "fp8_e4m3_tensor"),
    ("fp8_e4m3_tensor", "fp8_e5m2_tensor"),
    ("fp8_e4m3_tensor_pow2", "fp8_e4m3_tensor_pow2"),
    ("fp8_e4m3_row", "fp8_e4m3_row"),
    ("fp8_e5m2_row", "fp8_e4m3_tensor"),
    ("fp8_e4m3_tensor", "fp8_e5m2_row"),
    ("fp8_e4m3_delayed", "fp8_e4m3_delayed"),
    ("fp8_e5m2_delayed", "fp8_e4m3_row"),
]
HOW = ["host", "device", "table", "together"]
USAGES = [Usage(True, True), Usage(True, False), Usage(False, True)]


def columns(rows: int, multiple: int = 16) -> int:
    return -(-rows // multiple) * multiple


def segments(splits: list[int], how: str) -> Segments:
    """Of rows that the host knows, for products of their own ("host") or grouped ones, or that the device counts."""
    multiple = 16 if how in ("host", "table") else 128
    ends = np.cumsum([splits, [columns(n, multiple) for n in splits]], axis=1)
    both = torch.from_numpy(ends.astype(np.int32)).reshape(-1)
    result = Segments(both, len(splits), sum(splits), int(ends[1, -1]), multiple == 128)
    if how != "device":
        return result
    outcome = segments_of(torch.tensor(splits), sum(splits))
    assert torch.equal(outcome.ends, result.ends) and outcome.width >= result.width
    return outcome


class RecordingSlot(Slot):
    """A scale, and the amax that the cast would record."""

    def __init__(self, scale: Tensor) -> None:
        self.scale, self.live = scale, torch.zeros(1)

    def scale_for(self, x: Tensor) -> Tensor:
        magnitudes = x.float().abs().nan_to_num(0.0, torch.inf)
        self.live = magnitudes.max().reshape(1) if x.numel() else self.live
        return self.scale


def coded_segments(cast: SegmentCast, x: Tensor, splits: list[int], scales: Tensor, how: str) -> tuple[Coded, Tensor]:
    """The codes of all segments: of one matrix, by counts on the device, or of matrices of their own."""
    live = torch.zeros(len(splits) * 2, dtype=torch.int32)
    arguments = (scales.repeat_interleave(2), live, 2)
    if how != "table":
        return cast(x, segments(splits, how), arguments), live[::2]
    apart = [rows.clone() for rows in x.split(splits)]
    first = apart[0]
    offsets = [(one.data_ptr() - first.data_ptr()) // x.itemsize for one in apart]
    where = Table(torch.tensor(offsets), not any(n % 16 for n in offsets))
    return cast(first, segments(splits, how), arguments, where), live[::2]


def compared(pair: tuple[str, str], usage: Usage, dtype: torch.dtype, splits: list[int], how: str) -> Check:
    row, col = (formats.get(name) if used else None for name, used in zip(pair, usage, strict=True))
    shared = row is not None and row == col and row.is_derivable
    x = awkward()[: sum(splits), :K].to(dtype).contiguous()
    whole = how in ("device", "together")
    cast = SegmentCast(Cast(_spec(row, dtype), _spec(col, dtype), shared))
    scales = torch.rand(len(splits)) * 100
    coded, live = coded_segments(cast, x, splits, scales, how)
    start = at = 0
    for e, n in enumerate(splits):
        slot = RecordingSlot(scales[e : e + 1])
        alone = Quantizer(row, col).encode(x[start : start + n], usage, QuantizeContext(slots=(slot, slot)))
        p = columns(n, 128 if whole else 16)
        where = f"{pair} {usage} {dtype} {splits} {how} segment {e}"
        if alone.rowwise is not None:
            yield f"{where} row codes", coded.row[start : start + n], alone.rowwise.parts["codes"]
            place = (start, start + n) if whole else (at, at + n)
            yield f"{where} row scales", *scales_of(coded.row_scale, alone.rowwise, row, e, place)
        if alone.columnwise is not None:
            codes = coded.col[:, at : at + p] if whole else coded.col[K * at : K * (at + p)].view(K, p)
            yield f"{where} column codes", codes[:, :n], alone.columnwise.parts["codes"]
            yield f"{where} padding", codes[:, n:], torch.zeros(K, p - n, dtype=torch.uint8)
            yield f"{where} column scales", *scales_of(coded.col_scale, alone.columnwise, col, e, None)
        if any(fmt is not None and fmt.is_delayed for fmt in (row, col)):
            yield f"{where} amax", live[e : e + 1].view(torch.float32), slot.live
        start, at = start + n, at + p


BLOCK_PAIRS = [
    ("fp8_e4m3_1x128", "fp8_e4m3_1x128"),
    ("fp8_e5m2_1x128_fp32", "fp8_e4m3_128x128"),
    ("fp8_e4m3_128x128", "fp8_e4m3_128x128"),
    ("fp8_e4m3_128x128_fp32", "fp8_e5m2_1x128"),
]


def in_blocks(pair: tuple[str, str], usage: Usage, splits: list[int], apart: bool) -> Check:
    """The cast to blocks of each segment, which no block leaves."""
    row, col = (formats.get(name) if used else None for name, used in zip(pair, usage, strict=True))
    shared = row is not None and row == col and row.is_derivable
    x = torch.randn(sum(splits), 256).bfloat16()
    x[::5, ::3], x[1, 2], x[0, 130] = 0.0, torch.inf, torch.nan
    cast, kind = (
        BlockSegmentCast(Cast(_spec(row, x.dtype), _spec(col, x.dtype), shared)),
        "table" if apart else "device",
    )
    parts, where = [rows.clone() for rows in x.split(splits)], None
    if apart:
        offsets = [(one.data_ptr() - parts[0].data_ptr()) // x.itemsize for one in parts]
        where = Table(torch.tensor(offsets), not any(n % 16 for n in offsets))
    segmented = segments(splits, kind)
    coded = cast(parts[0] if apart else x, segmented, table=where)
    width, start, at = segmented.width, 0, 0
    for e, part in enumerate(parts):
        n, p = len(part), columns(len(part), 128)
        name, alone = f"{pair} {usage} {splits} {apart=} segment {e}", Quantizer(row, col).encode(part, usage)
        if alone.rowwise is not None:
            scale, here = alone.rowwise.parts["scale"], (2 * start if row.block.rows == 1 else at // 64)
            yield f"{name} row codes", coded.row[start : start + n], alone.rowwise.parts["codes"]
            flat = (scale.t() if row.block.rows == 1 else scale).reshape(-1)
            yield f"{name} row scales", coded.row_scale[here : here + flat.numel()], flat
        if alone.columnwise is not None:
            codes = (
                coded.col[256 * at : 256 * (at + p)].view(256, p)
                if apart
                else coded.col.view(256, width)[:, at : at + p]
            )
            scale, here = alone.columnwise.parts["scale"], (2 * at if col.block.rows == 1 else at // 64)
            yield f"{name} column codes", codes[:, :n], alone.columnwise.parts["codes"]
            yield f"{name} padding", codes[:, n:], torch.zeros(256, p - n, dtype=torch.uint8)
            flat = (scale.t() if col.block.rows == 1 else scale).reshape(-1)
            yield f"{name} column scales", coded.col_scale[here : here + flat.numel()], flat
        start, at = start + n, at + p


def scales_of(stored: Any, plane: Any, fmt: Any, e: int, rows: Any) -> tuple[Tensor, Tensor]:
    """What was stored for a segment, and what its plane has."""
    want = plane.parts["scale"].reshape(-1)
    if fmt.block.rows != 1 or rows is None:
        return stored[e], want
    return stored[slice(*rows)], want


def scattered(w: Tensor, scales: Tensor) -> Any:
    """Matrices (E, N, K) and their scales (E, n) as tensors of their own, not in the order of their addresses."""
    codes, each = [one.clone() for one in w][::-1], [one.clone() for one in scales][::-1]
    codes, each = codes[::-1], each[::-1]
    low = min(codes, key=Tensor.data_ptr)
    apart = [one.data_ptr() - low.data_ptr() for one in codes]
    step = math.gcd(*apart) or low.numel()
    offsets = [(one.data_ptr() - each[0].data_ptr()) // 4 for one in each]
    places = torch.tensor([*(n // step for n in apart), *offsets])
    matrices = grouped.Scattered(low, max(apart) // step + 1, step, places)
    keep = codes, each  # for as long as the result is used
    return lambda of_x, keep=keep: (matrices, (of_x, each[0].view(1, -1)))


def block_products(square: bool, splits: list[int], first: torch.dtype) -> Check:
    """As `products`, with powers of two for the scales of blocks."""
    torch.manual_seed(sum(splits))
    k, n, e = 256, 384, len(splits)
    kernel, result = grouped.GroupedProduct.of_blocks(square), segments(splits, "device")
    ints = [torch.randint(-2, 3, size).float() for size in ((sum(splits), k), (e, n, k))]
    x, w = ints[0].to(first), ints[1].to(torch.float8_e4m3fn)
    sizes = (sum(splits), k // 128), (e, n // 128, k // 128) if square else (e, n, k // 128)
    of_x, of_w = (torch.exp2(torch.randint(-2, 3, size).float()) for size in sizes)
    stored_x = torch.cat([one.t().reshape(-1) for one in of_x.split(splits)])
    stored_w = (of_w if square else of_w.transpose(1, 2)).reshape(e, -1).contiguous()
    scaled = ints[0] * of_x.repeat_interleave(128, 1)
    each = ints[1] * (of_w.repeat_interleave(128, 1) if square else of_w).repeat_interleave(128, 2)
    bias = torch.randint(-9, 9, (e, n)).float()
    y = kernel.of_rows(x, w, (stored_x, stored_w), result, torch.float32, bias)
    where = scattered(w, stored_w)
    apart = kernel.of_rows(x, *where(stored_x), result, torch.float32, bias)
    yield f"blocks, rows of {splits} by scattered matrices", apart, y
    for i, (rows, part) in enumerate(zip(scaled.split(splits), y.split(splits), strict=True)):
        yield f"blocks, rows of {splits} {i}", part, rows @ each[i].t() + bias[i]
    chunks = result.width // 128
    left = torch.exp2(torch.randint(-2, 3, (chunks, n)).float())
    right = torch.exp2(torch.randint(-2, 3, (chunks, k // 128 if square else k)).float())
    wide = torch.randint(-2, 3, (k + n, result.width)).float()
    ends = [0, *itertools.accumulate(columns(rows, 128) for rows in splits)]
    stored = [right[i // 128 : j // 128].t().reshape(-1) for i, j in itertools.pairwise(ends)]
    stored = torch.cat([*stored, right[ends[-1] // 128 :].reshape(-1)]) if square else right
    codes = wide[:n].to(first), wide[n:].to(torch.float8_e4m3fn)
    dw = kernel.of_columns(*codes, (left, stored), result, torch.float32)
    right = right.repeat_interleave(128, 1) if square else right
    dy, xt = wide[:n] * left.t().repeat_interleave(128, 1), wide[n:] * right.t().repeat_interleave(128, 1)
    for i, (low, high) in enumerate(itertools.pairwise(ends)):
        yield f"blocks, columns of {splits} {i}", dw[i], dy[:, low:high] @ xt[:, low:high].t()


def products(fast: bool, lines: bool, splits: list[int], first: torch.dtype) -> Check:
    """Sums of small integers are exact: what differs is wrong indexing."""
    torch.manual_seed(sum(splits))
    k, n, e = 144, 272, len(splits)
    kernel, result = grouped.GroupedProduct(fast, int(lines)), segments(splits, "device")
    ints = [torch.randint(-2, 3, size).float() for size in ((sum(splits), k), (e, n, k))]
    x, w = ints[0].to(first), ints[1].to(torch.float8_e4m3fn)
    wide = torch.full((k + n, result.width), torch.nan).to(torch.float8_e4m3fn)
    powers = [torch.exp2(torch.randint(-2, 3, size).float()) for size in ((sum(splits),), (e, n), (e, k))]
    of_x, of_w, of_k = powers if lines else ([torch.exp2(torch.arange(4.0 * e)).view(e, 4)[:, :1] / 16] * 3)
    bias = torch.randint(-9, 9, (e, n)).float()
    y = kernel.of_rows(x, w, (of_x, of_w), result, torch.float32)
    added = kernel.of_rows(x, w, (of_x, of_w), result, torch.float32, bias)
    where = scattered(w, of_w)
    yield f"rows of {splits} by scattered matrices", kernel.of_rows(x, *where(of_x), result, torch.float32), y
    added, sums = added.split(splits), grouped.sums(ints[0], result)
    start = at = 0
    for i, rows in enumerate(splits):
        here, padded = slice(start, start + rows), slice(at, at + columns(rows, 128))
        scale = of_x[here, None] * of_w[i][None] if lines else of_x[i] * of_w[i]
        yield f"rows of {splits} {i}", y[here], (ints[0][here] @ ints[1][i].t()) * scale
        yield f"rows of {splits} {i} and a bias", added[i], y[here] + bias[i]
        yield f"sums of {splits} {i}", sums[i], ints[0][here].sum(0)
        wide[:, padded] = 0.0
        wide[:, at : at + rows] = torch.randint(-2, 3, (k + n, rows)).to(wide.dtype)
        start, at = start + rows, padded.stop
    dw = kernel.of_columns(wide[:n].float().to(first), wide[n:], (of_w, of_k), result, torch.float32)
    at = 0
    for i, rows in enumerate(splits):
        here = wide[:, at : at + rows].float()
        scale = of_w[i][:, None] * of_k[i][None] if lines else of_w[i] * of_k[i]
        yield f"columns of {splits} {i}", dw[i], (here[:n] @ here[n:].t()) * scale
        at += columns(rows, 128)
    mains = [torch.randint(-9, 9, (n, k)).float() for _ in splits][::-1]  # not in the order of their addresses
    arguments = wide[:n].float().to(first), wide[n:], (of_w, of_k), result
    for dtype, adds in itertools.product((torch.float32, torch.bfloat16), (True, False)):
        mains = [one.to(dtype) for one in mains]
        before, offsets = torch.stack(mains), [(one.data_ptr() - mains[0].data_ptr()) // one.itemsize for one in mains]
        places = Table(torch.tensor(offsets), not any(one % 16 for one in offsets))
        kernel.of_columns_into(*arguments, mains[0], places, adds)
        want = dw + before.float() if adds else dw
        yield f"columns of {splits}, {dtype} {adds=}", torch.stack(mains), want.to(dtype)


def checks(everything: bool) -> Check:
    """Each pair meets each usage and each way: three ways with one usage each, here the fourth with both planes."""
    inputs = zip(itertools.product(PAIRS, USAGES), itertools.cycle(SPLITS), itertools.cycle(HOW), strict=False)
    for (pair, usage), splits, how in inputs:
        yield from compared(pair, usage, torch.bfloat16, splits, how)
    for (i, pair), how in itertools.product(enumerate(PAIRS), HOW):
        if everything or how == HOW[(3 * i + 3) % 4]:
            yield from compared(pair, USAGES[0], torch.bfloat16, SPLITS[1], how)
    for pair in PAIRS:
        yield from compared(pair, USAGES[0], torch.float32, SPLITS[2], "host")
    for (pair, usage), apart in zip(itertools.product(BLOCK_PAIRS, USAGES), itertools.cycle((True, False))):
        yield from in_blocks(pair, usage, [128, 256] if apart else [130, 0, 3, 128, 261, 0], apart)
    for fast, lines in itertools.product((True, False), repeat=2):
        yield from products(fast, lines, SPLITS[1], torch.float8_e4m3fn)
    yield from products(False, False, [130, 0, 3, 128, 261, 0], torch.float8_e5m2)
    yield from block_products(True, [130, 0, 3, 128, 261, 0], torch.float8_e4m3fn)
    yield from block_products(False, [17, 0, 40, 13], torch.float8_e5m2)
    beyond = torch.tensor([9, -4, 80, 3], dtype=torch.int32)
    yield "ends stay inside", segments_of(beyond, 70).ends, torch.tensor([9, 9, 70, 70, 128, 128, 256, 256]).int()
    yield (
        "strided counts",
        segments_of(torch.tensor([9, 0, 61, 0])[::2], 70).ends,
        torch.tensor([9, 70, 128, 256]).int(),
    )


REPLACED = [(grouped, "_multiprocessors", lambda device: 2)]  # fewer programs than tiles
