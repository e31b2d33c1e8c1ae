"""The cast of all segments of a matrix in one launch. Bits are those of `Cast` for each segment."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from duotone.allocate import Allocate, allocator
from duotone.kernels.cast import Cast, plane_constants
from duotone.kernels.launch import Launch
from duotone.kernels.segments import (
    APART,
    CHUNK,
    ends_kernel,
    segment_amax_kernel,
    segment_cast_kernel,
    segment_lines_kernel,
)
from duotone.kernels.tile_scales import ABSENT, LINE, OUTSIDE, SHARED, TENSOR


class Segments(NamedTuple):
    """`count` segments of at most `rows` rows and `width` columns of codes in all.

    `ends` int32 (2 count,): ends of rows, then ends of columns. With `grouped`, one product takes all segments, and
    columnwise codes are one matrix (see `segment_cast_kernel`). `counts`: the rows of each segment if the host knows.
    """

    ends: Tensor
    count: int
    rows: int
    width: int
    grouped: bool = False
    counts: tuple[int, ...] | None = None

    @property
    def block(self) -> int:
        """The blocks that cover all segments in a kernel."""
        return 1 << max(1, (self.count - 1).bit_length())

    def tiles(self, rows: int) -> int:
        """The most rows of a tile."""
        return -(-self.rows // rows) + self.count


class Table(NamedTuple):
    """Where segments lie if they are separate tensors: int64 (E,), in elements from the first.

    `aligned`: all are multiples of 16.
    """

    offsets: Tensor
    aligned: bool


class Coded(NamedTuple):
    """uint8 codes (M, K) and their scales, columnwise codes and theirs; None if a plane is absent.

    One scale of each segment is fp32 (E, 1), `APART` floats apart; others lie next to each other.
    """

    row: Tensor | None
    row_scale: Tensor | None
    col: Tensor | None
    col_scale: Tensor | None


AMAX_ROWS, AMAX_VALUES = 16, 8192
SPAN, LINES, ACROSS = 256, 32, 256
TILE = (64, 128, 4)
ALIGNED_WORDS = 4
SOURCES = frozenset(n.value for n in (ABSENT, OUTSIDE, TENSOR, LINE, SHARED))


class SegmentCast:
    """Does to each segment what `cast` does to a matrix, for scales per tensor and per row."""

    @staticmethod
    def of(cast: Cast) -> "SegmentCast | None":
        """None if scales of the planes come from blocks."""
        return SegmentCast(cast) if SOURCES.issuperset(cast.sources) else None

    def __init__(self, cast: Cast) -> None:
        self.row, self.col, self.sources, self.floats = cast.row, cast.col, cast.sources, cast.floats
        self.shares_scale = cast.shared
        self.propagate, self.marks = cast.propagate, cast.marks
        self.needs_amax, self.needs_lines = cast.needs_amax, cast.needs_lines
        self._launch = functools.cache(self._bind)

    def __call__(
        self,
        x: Tensor,
        segments: Segments,
        slots: tuple[Tensor | None, Tensor | None, int] = (None, None, 0),
        table: Table | None = None,
    ) -> Coded:
        """Codes and scales of contiguous (M, K), or of the contiguous (N, K) that a table names; `x` is the first.

        `slots` are the encode scale of the first segment, the bits of the amax to raise, and the stride of segments in
        both.
        """
        k = x.shape[1]
        scale, live, slot = slots
        of_row, of_col = self._sources(x, k, segments, scale, table)
        row_codes, row_scales, col_codes, col_scales = result = self._empty(allocator(x), k, segments)
        tm, tk, _ = TILE
        offsets, aligned = (None, True) if table is None else table
        launch = self._launch("cast", segments.block, segments.grouped, live is not None, table is not None, aligned)
        tiles, across = segments.width // tm + segments.count, -(-k // tk)  # at most: an empty segment has one tile too
        tensors = (x, row_codes, row_scales, col_codes, col_scales, of_row, of_col, live, segments.ends, offsets)
        launch(tiles * across, tensors, (k, segments.width, segments.count, slot), self.floats)
        return result

    def _sources(
        self, x: Tensor, k: int, segments: Segments, scale: Tensor | None, table: Table | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The sources of the scales of the rowwise and of the columnwise plane."""
        sources = {OUTSIDE.value: (scale, scale)}
        offsets, aligned = (None, True) if table is None else table
        integers = k, segments.count
        if self.needs_amax:
            bits = torch.zeros(segments.count, dtype=torch.int32, device=x.device)
            launch = self._launch("amax", segments.block, False, False, table is not None, aligned)
            launch(segments.tiles(AMAX_ROWS), (x, bits, segments.ends, offsets), integers)
            sources[TENSOR.value] = bits, bits
        if self.needs_lines:
            second = -(-segments.rows // ALIGNED_WORDS) * ALIGNED_WORDS
            bits = torch.zeros(second + segments.count * k, dtype=torch.int32, device=x.device)
            lines = bits, bits[second:]
            launch = self._launch("lines", segments.block, False, False, table is not None, aligned)
            across = -(-k // ACROSS)
            launch(segments.tiles(SPAN) * across, (x, *lines, segments.ends, offsets), integers)
            sources[LINE.value] = lines
        nothing = None, None
        return sources.get(self.sources[0], nothing)[0], sources.get(self.sources[1], nothing)[1]

    def _empty(self, empty: Allocate, k: int, segments: Segments) -> Coded:
        count, rows, width, whole = segments.count, segments.rows, segments.width, segments.grouped
        row = row_scale = col = col_scale = None
        if self.row is not None:
            row = empty((rows, k), (k, 1), torch.uint8)
            row_scale = self._scales(0, count, ((rows if whole else width,), (1,)), empty)
        if self.col is not None:
            col = empty(*(((k, width), (width, 1)) if whole else ((k * width,), (1,))), torch.uint8)
            col_scale = row_scale if self.shares_scale else self._scales(1, count, ((count, k), (k, 1)), empty)
        return Coded(row, row_scale, col, col_scale)

    def _scales(self, side: int, count: int, lines: tuple[tuple[int, ...], tuple[int, ...]], empty: Allocate) -> Tensor:
        size, strides = lines if self.sources[side] == LINE.value else ((count, 1), (APART.value, 1))
        return empty(size, strides, torch.float32)

    def _bind(self, which: str, block: int, whole: bool, record: bool, table: bool, aligned: bool) -> Launch:
        where = {"TABLE": table, "ALIGNED": aligned, "EP": block}
        if which == "amax":
            return segment_amax_kernel.bind({**where, "ROWS": AMAX_ROWS, "VALUES": AMAX_VALUES}, warps=8)
        if which == "lines":
            return segment_lines_kernel.bind({**where, "SPAN": SPAN, "TM": LINES, "TK": ACROSS})
        tm, tk, warps = TILE
        constants = {
            **plane_constants("ROW", self.sources[0], self.row, self.propagate),
            **plane_constants("COL", self.sources[1], self.col, self.propagate),
            **{"MARKS": self.marks, "RECORD": record, "WHOLE": whole, "TM": tm, "TK": tk},
        }
        return segment_cast_kernel.bind({**constants, **where}, warps)


@functools.cache
def _ends(block: int) -> Launch:
    return ends_kernel.bind({"EP": block}, warps=1)


def segments_of(counts: Tensor, rows: int) -> Segments:
    """Segments for grouped products, from row counts on the device, int32 or int64. The matrix has `rows` rows. Nothing
    waits for the counts."""
    n = counts.shape[0]
    width = (rows // CHUNK.value + n) * CHUNK.value
    result = Segments(torch.empty(2 * n, dtype=torch.int32, device=counts.device), n, rows, width, grouped=True)
    _ends(result.block)(1, (counts if counts.is_contiguous() else counts.contiguous(), result.ends), (rows, n))
    return result
