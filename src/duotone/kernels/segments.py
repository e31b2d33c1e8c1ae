"""Kernels that cast a matrix (M, K) in one launch. Each of its consecutive row segments has separate scales.

Segments end where int32 `ends` says. Rows after the last are not read. In columnwise codes each segment takes a
multiple of STEP columns, or of CHUNK for grouped products. The last of them are zeros, so products take any segment.
Bits are those of `Cast` over each segment.
"""

import functools

import triton
import triton.language as tl

from duotone.kernels.amax import nan_to_zero, record
from duotone.kernels.elements import codes_of
from duotone.kernels.launch import kernel
from duotone.kernels.scaling import encode_scale, given_scale, marked_four, stored_scale
from duotone.kernels.tile_scales import ABSENT, LINE, OUTSIDE, SHARED, TENSOR, fours, line_scales
from duotone.kernels.tiles import store_turned
from duotone.kernels.values import wide

STEP = tl.constexpr(16)
"""A segment has a multiple of so many columns if each segment has its own product."""
CHUNK = tl.constexpr(128)
"""The same if one product takes all segments: it contracts so many columns at once."""
APART = tl.constexpr(4)
"""Floats from the scale of one segment to the next: cuBLAS takes scales only at multiples of 16 bytes."""


@triton.jit
def segment_of(p, ends, E, T: tl.constexpr, PAD: tl.constexpr, EP: tl.constexpr):
    """The segment of the p-th tile of T rows (E or more if it has none), the tile's number in it, and the segment's
    first row, rows, and first column of codes. Tiles cover multiples of PAD rows. An empty segment has one tile, which
    stores its scales."""
    i = tl.arange(0, EP)
    stop = tl.load(ends + i, mask=i < E, other=0)
    start = tl.load(ends + i - 1, mask=(i > 0) & (i < E), other=0)
    column = tl.load(ends + E + i - 1, mask=(i > 0) & (i < E), other=0)
    tiles = tl.where(i < E, tl.maximum(tl.cdiv(tl.cdiv(stop - start, PAD) * PAD, T), 1), 0)
    before = tl.cumsum(tiles, axis=0)
    e = tl.sum((before <= p).to(tl.int32), axis=0)
    here = i == e
    tile = p - tl.sum(tl.where(here, before - tiles, 0), axis=0)
    first = tl.sum(tl.where(here, start, 0), axis=0)
    rows = tl.sum(tl.where(here, stop - start, 0), axis=0)
    return e, tile, first, rows, tl.sum(tl.where(here, column, 0), axis=0)


@triton.jit
def place_of(table, e, first, K, TABLE: tl.constexpr, ALIGNED: tl.constexpr):
    """Where a segment starts, in elements from x: after the segments before it, or where the table says."""
    if TABLE:
        result = tl.load(table + e)
        if ALIGNED:
            result = tl.multiple_of(result, 16)
    else:
        result = first.to(tl.int64) * K
    return result


@functools.partial(kernel, unspecialized=("M", "E"))
def ends_kernel(counts, ends, M, E, EP: tl.constexpr):
    """Row counts -> ends of rows, then of columns, multiples of CHUNK. Rows beyond M are cut; negative counts are 0."""
    i = tl.arange(0, EP)
    n = tl.load(counts + i, mask=i < E, other=0).to(tl.int64)
    n = tl.minimum(tl.maximum(n, 0), M)
    total = tl.cumsum(n, axis=0)
    stop, start = tl.minimum(total, M), tl.minimum(total - n, M)
    columns = tl.cumsum(tl.cdiv(stop - start, CHUNK) * CHUNK, axis=0)
    tl.store(ends + i, stop.to(tl.int32), mask=i < E)
    tl.store(ends + E + i, columns.to(tl.int32), mask=i < E)


@functools.partial(kernel, unspecialized=("E",))
def segment_amax_kernel(
    x, out, ends, table, K, E,
    TABLE: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, VALUES: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """The amax of each segment into int32 bits that start at 0; a program walks over ROWS rows, VALUES at a time."""
    e, tile, first, rows, _ = segment_of(tl.program_id(0), ends, E, ROWS, 1, EP)
    if e >= E:
        return
    here = x + (place_of(table, e, first, K, TABLE, ALIGNED) + (tile * ROWS).to(tl.int64) * K)
    count = tl.minimum(rows - tile * ROWS, ROWS) * K
    i = tl.arange(0, VALUES)
    largest = tl.zeros([VALUES], tl.float32)
    for start in range(0, count, VALUES):
        value = tl.load(here + start + i, mask=start + i < count, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))  # which drops NaN
    bits = tl.max(largest, axis=0).to(tl.int32, bitcast=True)
    tl.atomic_max(out + e, bits, mask=bits > tl.load(out + e), sem="relaxed")


@functools.partial(kernel, unspecialized=("E",))
def segment_lines_kernel(
    x, rows_out, cols_out, ends, table, K, E,
    TABLE: tl.constexpr, ALIGNED: tl.constexpr, SPAN: tl.constexpr,
    TM: tl.constexpr, TK: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """amax of rows, (M,), and of the columns of each segment, (E, K), into int32 bits that start at 0."""
    across = tl.cdiv(K, TK)
    e, tile, first, rows, _ = segment_of(tl.program_id(0) // across, ends, E, SPAN, 1, EP)
    if e >= E:
        return
    k, im = (tl.program_id(0) % across) * TK + tl.arange(0, TK), tl.arange(0, TM)
    here = x + (place_of(table, e, first, K, TABLE, ALIGNED) + (tile * SPAN).to(tl.int64) * K)
    below = tl.zeros([TM, TK], tl.float32)
    for j in range(0, SPAN, TM):
        m = tile * SPAN + j + im
        inside = (m[:, None] < rows) & (k[None, :] < K)
        value = tl.abs(wide(here, (j + im)[:, None] * K + k[None, :], inside))
        below = tl.maximum(below, value)  # which drops NaN
        bits = nan_to_zero(tl.max(value, axis=1)).to(tl.int32, bitcast=True)
        tl.atomic_max(rows_out + first + m, bits, mask=m < rows, sem="relaxed")
    bits = tl.max(below, axis=0).to(tl.int32, bitcast=True)
    tl.atomic_max(cols_out + e.to(tl.int64) * K + k, bits, mask=k < K, sem="relaxed")


@triton.jit
def _one(source, e, SLOT, limits, FROM: tl.constexpr, CODEC: tl.constexpr):
    """The one scale of a segment, from outside or from its amax, and the stored form of it."""
    if FROM == OUTSIDE:
        amax = tl.load(source + e * SLOT)
        scale = given_scale(amax, CODEC)
    else:
        amax = tl.load(source + e).to(tl.float32, bitcast=True)
        scale = encode_scale(amax, limits, CODEC)
    return scale, stored_scale(amax, scale, limits[0], CODEC)


@triton.jit
def _column(
    scale, source, scales, e, SLOT, tile, pk, k, K, limits,
    FROM: tl.constexpr, CODEC: tl.constexpr,
):  # fmt: skip
    """Scales of columns k (TK,) of a tile's columnwise codes; `scale` is that of the rowwise ones."""
    lines = e.to(tl.int64) * K + k
    if FROM == LINE:
        scale = line_scales(source, scales, lines, lines, k < K, tile == 0, limits, CODEC)[None, :]
    elif FROM != SHARED:
        scale, stored = _one(source, e, SLOT, limits, FROM, CODEC)
        tl.store(scales + e * APART, stored, mask=(tile == 0) & (pk == 0))
    return scale


@triton.jit
def four_rows(here, at, m, rows, k, K):
    """Rows m to m + 3 of a tile."""
    v0 = wide(here, at, (m < rows) & (k < K))
    v1 = wide(here + K, at, (m + 1 < rows) & (k < K))
    v2 = wide(here + 2 * K, at, (m + 2 < rows) & (k < K))
    v3 = wide(here + 3 * K, at, (m + 3 < rows) & (k < K))
    return v0, v1, v2, v3


@functools.partial(kernel, unspecialized=("E", "SLOT"), any_alignment=("row_from", "col_from", "live"))
def segment_cast_kernel(
    x, row_codes, row_scales, col_codes, col_scales, row_from, col_from, live, ends, table, K, WIDTH, E, SLOT,
    row_largest, row_overflow, row_epsilon, col_largest, col_overflow, col_epsilon,
    ROW: tl.constexpr, ROW_ELEMENT: tl.constexpr, ROW_CODEC: tl.constexpr,
    COL: tl.constexpr, COL_ELEMENT: tl.constexpr, COL_CODEC: tl.constexpr,
    MARKS: tl.constexpr, RECORD: tl.constexpr, TABLE: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
    TM: tl.constexpr, TK: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """One tile of one segment. `row_from` and `col_from` hold encode scales, SLOT apart, or bits of amaxes.

    With WHOLE, columnwise codes are one matrix (K, WIDTH), and scales of rows lie as the rows. Otherwise there is a
    (K, length) of codes for each segment, one after the other, and scales of rows lie as columns of codes.
    """
    PAD: tl.constexpr = CHUNK if WHOLE else STEP
    H: tl.constexpr = TM // 4
    across = tl.cdiv(K, TK)
    pk = tl.program_id(0) % across
    e, tile, first, rows, column = segment_of(tl.program_id(0) // across, ends, E, TM, PAD, EP)
    if e >= E:
        return
    start, top = place_of(table, e, first, K, TABLE, ALIGNED), (tile * TM).to(tl.int64)
    i, k = 4 * tl.arange(0, H)[:, None], (pk * TK + tl.arange(0, TK))[None, :]
    m, here, at = tile * TM + i, x + (start + top * K), i * K + k
    values = four_rows(here, at, m, rows, k, K)
    if RECORD:
        above = tl.maximum(tl.abs(values[0]), tl.abs(values[1]))
        record(live + e * SLOT, tl.maximum(above, tl.maximum(tl.abs(values[2]), tl.abs(values[3]))))

    scale, row_limits = 1.0, (row_largest, row_overflow, row_epsilon)
    if ROW == OUTSIDE or ROW == TENSOR:
        scale, stored = _one(row_from, e, SLOT, row_limits, ROW, ROW_CODEC)
        tl.store(row_scales + e * APART, stored, mask=(tile == 0) & (pk == 0))
    if ROW != ABSENT:
        codes, row_values = row_codes + (first + top) * K, marked_four(values, MARKS and ROW == OUTSIDE)
        scales = (scale, scale, scale, scale)
        if ROW == LINE:
            line = tile * TM + tl.arange(0, TM)
            of_rows = line_scales(
                row_from, row_scales, first + line, (first if WHOLE else column) + line, line < rows, pk == 0,
                row_limits, ROW_CODEC,
            )  # fmt: skip
            scales = fours(of_rows, H)
        for j in tl.static_range(4):
            of_row = codes_of(row_values[j] * scales[j], ROW_ELEMENT)
            tl.store(codes + j * K + at, of_row, mask=(m + j < rows) & (k < K))

    if COL != ABSENT:
        columns = pk * TK + tl.arange(0, TK)
        scale = _column(
            scale, col_from, col_scales, e, SLOT, tile, pk, columns, K, (col_largest, col_overflow, col_epsilon),
            COL, COL_CODEC,
        )  # fmt: skip
        column, length = column // PAD * PAD, tl.cdiv(rows, PAD) * PAD  # multiples that the compiler sees
        out = col_codes + (column.to(tl.int64) if WHOLE else column.to(tl.int64) * K)
        stride = WIDTH if WHOLE else length
        values = marked_four(values, MARKS and (COL == OUTSIDE or (COL == SHARED and ROW == OUTSIDE)))
        store_turned(values, scale, out, stride, tile, pk, length, K, COL_ELEMENT, False, H, TK)
