"""Checks: the cast of segments, against the plain stages over each segment, and grouped products."""

import itertools
from typing import Any

import numpy as np
import torch
from interpreting import Check, awkward
from torch import Tensor

from duotone import formats
from duotone.dispatch.casts import _spec
from duotone.kernels import grouped
from duotone.kernels.cast import Cast
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
    made = Segments(both, len(splits), sum(splits), int(ends[1, -1]), multiple == 128)
    if how != "device":
        return made
    found = segments_of(torch.tensor(splits), sum(splits))
    assert torch.equal(found.ends, made.ends) and found.width >= made.width
    return found


class Given(Slot):
    """A scale, and the amax that the cast would record."""

    def __init__(self, scale: Tensor) -> None:
        self.scale, self.live = scale, torch.zeros(1)

    def scale_for(self, x: Tensor) -> Tensor:
        known = x.float().abs().nan_to_num(0.0, torch.inf)
        self.live = known.max().reshape(1) if x.numel() else self.live
        return self.scale


def made(cast: SegmentCast, x: Tensor, splits: list[int], scales: Tensor, how: str) -> tuple[Coded, Tensor]:
    """The codes of all segments: of one matrix, by counts on the device, or of matrices of their own."""
    live = torch.zeros(len(splits) * 2, dtype=torch.int32)
    given = (scales.repeat_interleave(2), live, 2)
    if how != "table":
        return cast(x, segments(splits, how), given), live[::2]
    apart = [rows.clone() for rows in x.split(splits)]
    first = apart[0]
    offsets = [(one.data_ptr() - first.data_ptr()) // x.itemsize for one in apart]
    where = Table(torch.tensor(offsets), not any(n % 16 for n in offsets))
    return cast(first, segments(splits, how), given, where), live[::2]


def compared(pair: tuple[str, str], usage: Usage, dtype: torch.dtype, splits: list[int], how: str) -> Check:
    row, col = (formats.get(name) if used else None for name, used in zip(pair, usage, strict=True))
    shared = row is not None and row == col and row.is_derivable
    x = awkward()[: sum(splits), :K].to(dtype).contiguous()
    whole = how in ("device", "together")
    cast = SegmentCast(Cast(_spec(row, dtype), _spec(col, dtype), shared))
    scales = torch.rand(len(splits)) * 100
    coded, live = made(cast, x, splits, scales, how)
    start = at = 0
    for e, n in enumerate(splits):
        slot = Given(scales[e : e + 1])
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


def scales_of(stored: Any, plane: Any, fmt: Any, e: int, rows: Any) -> tuple[Tensor, Tensor]:
    """What was stored for a segment, and what its plane has."""
    want = plane.parts["scale"].reshape(-1)
    if fmt.block.rows != 1 or rows is None:
        return stored[e], want
    return stored[slice(*rows)], want


def products(fast: bool, lines: bool, splits: list[int], first: torch.dtype) -> Check:
    """Sums of small integers are exact: what differs is wrong indexing."""
    torch.manual_seed(sum(splits))
    k, n, e = 144, 272, len(splits)
    made, found = grouped.GroupedProduct(fast, lines), segments(splits, "device")
    ints = [torch.randint(-2, 3, size).float() for size in ((sum(splits), k), (e, n, k))]
    x, w = ints[0].to(first), ints[1].to(torch.float8_e4m3fn)
    wide = torch.full((k + n, found.width), torch.nan).to(torch.float8_e4m3fn)
    powers = [torch.exp2(torch.randint(-2, 3, size).float()) for size in ((sum(splits),), (e, n), (e, k))]
    of_x, of_w, of_k = powers if lines else ([torch.exp2(torch.arange(4.0 * e)).view(e, 4)[:, :1] / 16] * 3)
    bias = torch.randint(-9, 9, (e, n)).float()
    y = made.of_rows(x, w, (of_x, of_w), found, torch.float32)
    added = made.of_rows(x, w, (of_x, of_w), found, torch.float32, bias)
    added, sums = added.split(splits), grouped.sums(ints[0], found)
    start = at = 0
    for i, rows in enumerate(splits):
        here, mine = slice(start, start + rows), slice(at, at + columns(rows, 128))
        scale = of_x[here, None] * of_w[i][None] if lines else of_x[i] * of_w[i]
        yield f"rows of {splits} {i}", y[here], (ints[0][here] @ ints[1][i].t()) * scale
        yield f"rows of {splits} {i} and a bias", added[i], y[here] + bias[i]
        yield f"sums of {splits} {i}", sums[i], ints[0][here].sum(0)
        wide[:, mine] = 0.0
        wide[:, at : at + rows] = torch.randint(-2, 3, (k + n, rows)).to(wide.dtype)
        start, at = start + rows, mine.stop
    dw = made.of_columns(wide[:n].float().to(first), wide[n:], (of_w, of_k), found, torch.float32)
    at = 0
    for i, rows in enumerate(splits):
        here = wide[:, at : at + rows].float()
        scale = of_w[i][:, None] * of_k[i][None] if lines else of_w[i] * of_k[i]
        yield f"columns of {splits} {i}", dw[i], (here[:n] @ here[n:].t()) * scale
        at += columns(rows, 128)
    mains = [torch.randint(-9, 9, (n, k)).float() for _ in splits][::-1]  # not in the order of their addresses
    given = wide[:n].float().to(first), wide[n:], (of_w, of_k), found
    for dtype, adds in itertools.product((torch.float32, torch.bfloat16), (True, False)):
        mains = [one.to(dtype) for one in mains]
        before, offsets = torch.stack(mains), [(one.data_ptr() - mains[0].data_ptr()) // one.itemsize for one in mains]
        places = Table(torch.tensor(offsets), not any(one % 16 for one in offsets))
        made.of_columns_into(*given, mains[0], places, adds)
        want = dw + before.float() if adds else dw
        yield f"columns of {splits}, {dtype} {adds=}", torch.stack(mains), want.to(dtype)


def checks(everything: bool) -> Check:
    """Each pair meets each usage and each way: three ways with one usage each, here the fourth with both planes."""
    given = zip(itertools.product(PAIRS, USAGES), itertools.cycle(SPLITS), itertools.cycle(HOW), strict=False)
    for (pair, usage), splits, how in given:
        yield from compared(pair, usage, torch.bfloat16, splits, how)
    for (i, pair), how in itertools.product(enumerate(PAIRS), HOW):
        if everything or how == HOW[(3 * i + 3) % 4]:
            yield from compared(pair, USAGES[0], torch.bfloat16, SPLITS[1], how)
    for pair in PAIRS:
        yield from compared(pair, USAGES[0], torch.float32, SPLITS[2], "host")
    for fast, lines in itertools.product((True, False), repeat=2):
        yield from products(fast, lines, SPLITS[1], torch.float8_e4m3fn)
    yield from products(False, False, [130, 0, 3, 128, 261, 0], torch.float8_e5m2)
    beyond = torch.tensor([9, -4, 80, 3], dtype=torch.int32)
    yield "ends stay inside", segments_of(beyond, 70).ends, torch.tensor([9, 9, 70, 70, 128, 128, 256, 256]).int()
    yield (
        "strided counts",
        segments_of(torch.tensor([9, 0, 61, 0])[::2], 70).ends,
        torch.tensor([9, 70, 128, 256]).int(),
    )


REPLACED = [(grouped, "_multiprocessors", lambda device: 2)]  # fewer programs than tiles
