"""The cast of all segments of a matrix to scales of blocks 128 wide, in one launch. Bits are those of `Cast` for each.

Blocks end where their segment ends. Segments take multiples of CHUNK columns of codes.
"""

import functools

import torch
import triton.language as tl
from torch import Tensor

from duotone.allocate import allocator
from duotone.formats import ScaleCodec
from duotone.kernels.cast import BLOCKED, Cast, PlaneSpec, block_constants, plane_constants
from duotone.kernels.launch import Launch, kernel
from duotone.kernels.segment_cast import Coded, Segments, Table
from duotone.kernels.segments import CHUNK, four_rows, place_of, segment_of
from duotone.kernels.tile_scales import ABSENT
from duotone.kernels.tiles import cast_tile


@functools.partial(kernel, unspecialized=("E",))
def segment_blocks_kernel(
    x, row_codes, row_scales, col_codes, col_scales, ends, table, K, WIDTH, E,
    row_largest, row_overflow, row_epsilon, col_largest, col_overflow, col_epsilon,
    ROW: tl.constexpr, ROW_ELEMENT: tl.constexpr, ROW_R: tl.constexpr, ROW_C: tl.constexpr, ROW_CODEC: tl.constexpr,
    COL: tl.constexpr, COL_ELEMENT: tl.constexpr, COL_R: tl.constexpr, COL_C: tl.constexpr, COL_CODEC: tl.constexpr,
    TABLE: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
    TM: tl.constexpr, TK: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """One tile of one segment, as a tile of a matrix (rows, K) that lies in the planes of all segments.

    With WHOLE, columnwise codes are one matrix (K, WIDTH). Otherwise there is a (K, length) for each segment, one after
    the other. So are the scales of segments.
    """
    across = K // TK
    pk = tl.program_id(0) % across
    e, tile, first, rows, column = segment_of(tl.program_id(0) // across, ends, E, TM, CHUNK, EP)
    if e >= E:
        return
    i, k = 4 * tl.arange(0, TM // 4)[:, None], (pk * TK + tl.arange(0, TK))[None, :]
    here = x + (place_of(table, e, first, K, TABLE, ALIGNED) + (tile * TM).to(tl.int64) * K)
    values = four_rows(here, i * K + k, tile * TM + i, rows, k, K)
    length, first = tl.cdiv(rows, CHUNK) * CHUNK, first.to(tl.int64)
    column = (column // CHUNK * CHUNK).to(tl.int64)  # a multiple that the compiler sees
    if ROW != ABSENT:
        row_codes += first * K
        row_scales += (first if ROW_R == 1 else column // CHUNK) * across
    if COL != ABSENT:
        col_codes += column if WHOLE else column * K
        col_scales += column // CHUNK * (K if COL_C == 1 else across)
    row_plane = row_codes, row_scales, None, (row_largest, row_overflow, row_epsilon)
    col_plane = col_codes, col_scales, None, (col_largest, col_overflow, col_epsilon)
    cast_tile(
        values, row_plane, col_plane, None, tile, pk, rows, K, 0, length, WIDTH if WHOLE else length,
        ROW, ROW_ELEMENT, ROW_R, ROW_C, ROW_CODEC, COL, COL_ELEMENT, COL_R, COL_C, COL_CODEC,
        False, False, TM, TK, EVEN, 1,
    )  # fmt: skip


class BlockSegmentCast:
    """Like `SegmentCast`, for scales of 1 x 128 and 128 x 128 blocks. K is a multiple of 128.

    Scales of a segment are (K / 128, rows), or (rows / 128, K / 128) of squares, columnwise ones (rows / 128, K) and
    (K / 128, rows / 128).
    """

    @staticmethod
    def of(cast: Cast) -> "BlockSegmentCast | None":
        """None for other scales."""
        specs = [spec for spec in (cast.row, cast.col) if spec is not None]
        return BlockSegmentCast(cast) if all(_has_blocks(spec) for spec in specs) else None

    def __init__(self, cast: Cast) -> None:
        self.row, self.col, self.floats = cast.row, cast.col, cast.floats
        self.constants = {
            **plane_constants("ROW", cast.sources[0], cast.row, cast.propagate),
            **plane_constants("COL", cast.sources[1], cast.col, cast.propagate),
            **block_constants("ROW", cast.row, turned=False),
            **block_constants("COL", cast.col, turned=True),
        }
        self._launch = functools.cache(self._bind)

    def __call__(self, x: Tensor, segments: Segments, slots: object = None, table: Table | None = None) -> Coded:
        """Codes and scales of contiguous (M, K), or of the contiguous (N, K) that a table names; `x` is the first.

        Without a table, segments are `grouped`; with one, N is a multiple of 128.
        """
        k, (tm, tk, _) = x.shape[1], BLOCKED
        empty, row, row_scale, col, col_scale = allocator(x), None, None, None, None
        blocks = segments.width // tm * (k // tk)
        if self.row is not None:
            row = empty((segments.rows, k), (k, 1), torch.uint8)
            count = segments.rows * (k // tk) if self.row.rows == 1 else blocks
            row_scale = empty((count,), (1,), torch.float32)
        if self.col is not None:
            wide = segments.width
            col = empty(*(((k, wide), (wide, 1)) if segments.grouped else ((k * wide,), (1,))), torch.uint8)
            col_scale = empty((wide // tm * k if self.col.rows == 1 else blocks,), (1,), torch.float32)
        offsets, aligned = (None, True) if table is None else table
        launch = self._launch(segments.block, segments.grouped, table is not None, aligned)
        tensors = x, row, row_scale, col, col_scale, segments.ends, offsets
        programs = (segments.width // tm + segments.count) * (k // tk)  # at most: an empty segment has one, too
        launch(programs, tensors, (k, segments.width, segments.count), self.floats)
        return Coded(row, row_scale, col, col_scale)

    def _bind(self, block: int, whole: bool, table: bool, aligned: bool) -> Launch:
        tm, tk, warps = BLOCKED
        where = {"TABLE": table, "ALIGNED": aligned, "WHOLE": whole, "EVEN": table, "TM": tm, "TK": tk, "EP": block}
        return segment_blocks_kernel.bind({**self.constants, **where}, warps if table else 2 * warps)


def _has_blocks(spec: PlaneSpec) -> bool:
    fp8 = isinstance(spec.element, torch.dtype) and spec.codec is not ScaleCodec.E8M0
    return fp8 and (spec.rows, spec.cols) in ((1, CHUNK.value), (CHUNK.value, CHUNK.value))
