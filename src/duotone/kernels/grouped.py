"""FP8 products of all row segments of a matrix in one launch, on compute capability 9.0.

Tensor descriptors bring operands to the shared memory that the tensor cores read. So the contraction of both is
contiguous, and padded with zeros to multiples of CHUNK. `ends` holds the ends of rows, then the ends of columns that
are padded in this way.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from duotone.allocate import allocator
from duotone.kernels.launch import Described, Kernel, Launch, kernel
from duotone.kernels.segment_cast import Segments, Table
from duotone.kernels.segments import CHUNK


class Tile(NamedTuple):
    """Rows and columns of the result that a program computes at a time, its warps, its buffers, and the tiles in a
    column of a patch. There are as many programs as multiprocessors if they `walk`, else as many as tiles. `registers`
    is the limit of a thread.
    """

    rows: int
    cols: int
    warps: int
    stages: int
    patch: int
    walk: bool
    registers: int = 0


ALIGNED = 16
"""The places of an aligned `Table` are multiples of this."""

SEGMENT, LINE, BLOCK = (tl.constexpr(i) for i in range(3))
"""What each scale belongs to: a segment, a row of either operand, or a block of both operands."""

TILES = {True: Tile(128, 256, 8, 3, 8, True), False: Tile(128, 128, 4, 3, 8, False)}
"""By `fast`. Sums outside of the tensor cores take more registers, and half a tile at a time. Two programs share a
multiprocessor: one adds while the other multiplies. New programs take the places of those that end."""


BLOCK_TILE = Tile(64, 128, 4, 3, 16, False, 168)
"""The tile for scales of blocks, which take registers too. With this limit three programs share a multiprocessor."""


@triton.jit
def _place(p, down, across, PATCH: tl.constexpr):
    """The row and the column of tile p of (down, across) tiles. Tiles are in patches that share operands in L2."""
    patch = PATCH * across
    first = p // patch * PATCH
    high = tl.minimum(down - first, PATCH)
    return first + p % patch % high, p % patch // high


@triton.jit
def _right(b, member, col, k, BN: tl.constexpr):
    """(CHUNK, BN) of the matrix b or, unless None, of that member of matrices that lie apart."""
    if member is None:
        codes = b.load([col, k])
    else:
        codes = b.load([member, col, k]).reshape([BN, CHUNK])
    return codes.T


@triton.jit
def _fast_sums(a, b, member, row, col, low, high, BM: tl.constexpr, BN: tl.constexpr):
    """BM rows of a times BN rows of b over columns from low to high, as the tensor cores add up: with 14 bits."""
    total = tl.zeros([BM, BN], tl.float32)
    for k in range(low, high, CHUNK):
        total = tl.dot(a.load([row, k]), _right(b, member, col, k, BN), total)
    return total


@triton.jit
def _promoted_sums(a, b, member, row, col, low, high, BM: tl.constexpr, BN: tl.constexpr):
    """The same for these rows of a and for the next BM rows, added up in fp32 after each CHUNK."""
    upper = tl.zeros([BM, BN], tl.float32)
    lower = tl.zeros([BM, BN], tl.float32)
    for k in range(low, high, CHUNK):
        right = _right(b, member, col, k, BN)
        upper = upper + tl.dot(a.load([row, k]), right)
        lower = lower + tl.dot(a.load([row + BM, k]), right)
    return upper, lower


@triton.jit
def _block_sums(
    a, b, member, row, col, low, high, of_a, of_b, m, M, n, N, SQUARE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """BM rows of a times BN rows of b. Each CHUNK is multiplied by the scales of its blocks before it is added.

    of_a (chunks, M) holds the scales of lines m. of_b holds those of lines n in (chunks, N) or, if SQUARE, of CHUNK
    lines in (N / CHUNK, chunks).
    """
    total = tl.zeros([BM, BN], tl.float32)
    left = of_a + tl.minimum(m, M - 1)
    if SQUARE:
        right = of_b + n // CHUNK * ((high - low) // CHUNK)
    else:
        right = of_b + tl.minimum(n + tl.arange(0, BN), N - 1)[None, :]
    for k in range(low, high, CHUNK):
        of_rows, of_cols = tl.load(left), tl.load(right)
        if SQUARE:
            of_rows, of_cols = of_rows * of_cols, 1.0
        total = total + tl.dot(a.load([row, k]), _right(b, member, col, k, BN)) * of_cols * of_rows[:, None]
        left, right = left + M, right + (1 if SQUARE else N)
    return total


@triton.jit
def _store(out, total, m, n, M, N, of_a, of_b, bias, SCALES: tl.constexpr, ADDS: tl.constexpr = False):
    """Scale, round and store a tile. A bias is added unless None, and with ADDS the stored value. Scales of rows and
    columns begin at of_a and of_b, or these are the one scale. The sums contain scales of blocks."""
    scale = 1.0
    if SCALES == LINE:
        of_rows = tl.load(of_a + m, mask=m < M, other=0.0)
        scale = of_rows[:, None] * tl.load(of_b + n, mask=n < N, other=0.0)[None, :]
    elif SCALES == SEGMENT:
        scale = tl.load(of_a) * tl.load(of_b)
    at, inside = m.to(tl.int64)[:, None] * N + n[None, :], (m < M)[:, None] & (n < N)[None, :]
    total = total * scale
    if bias is not None:
        total = total + tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if ADDS and out.dtype.element_ty == tl.float32:
        # This needs no registers for the stored values. Subnormal sums become 0.
        tl.atomic_add(out + at, total, mask=inside, sem="relaxed")
    else:
        if ADDS:
            total = total + tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _tile(
    a, b, member, row, col, low, high, out, n, first, M, N, of_a, of_b, bias,
    FAST: tl.constexpr, SCALES: tl.constexpr, SQUARE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    ADDS: tl.constexpr = False,
):  # fmt: skip
    """The tile of `out` at (row, n), from BM rows of a and the BN rows of b at `col`, over columns from low to high.

    Rows of the segment are those from `first` to M.
    """
    block = n
    n += tl.arange(0, BN)
    if FAST:
        total = _fast_sums(a, b, member, row, col, low, high, BM, BN)
        _store(out, total, row + tl.arange(0, BM), n, M, N, of_a, of_b, bias, SCALES, ADDS)
    elif SCALES == BLOCK:
        m = row + tl.arange(0, BM)
        total = _block_sums(
            a, b, member, row, col, low, high, of_a, of_b, m - first, M - first, block, N, SQUARE, BM, BN
        )  # fmt: skip
        _store(out, total, m, n, M, N, of_a, of_b, bias, SCALES, ADDS)
    else:
        HALF: tl.constexpr = BM // 2
        upper, lower = _promoted_sums(a, b, member, row, col, low, high, HALF, BN)
        m = row + tl.arange(0, HALF)
        _store(out, upper, m, n, M, N, of_a, of_b, bias, SCALES, ADDS)
        _store(out, lower, m + HALF, n, M, N, of_a, of_b, bias, SCALES, ADDS)


@functools.partial(kernel, unspecialized=("E", "PROGRAMS"))
def rows_kernel(
    a, b, out, ends, of_a, of_b, bias, places, N, K, E, PROGRAMS, NEXT_A, NEXT_B,
    FAST: tl.constexpr, SCALES: tl.constexpr, SQUARE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PATCH: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """Segments of a (M, K) times the transpose of b (E N, K) of each, plus the bias (E N,) unless None -> (M, N).

    Scales of a segment of a lie NEXT_A apart, those of rows one after the other, those of blocks as the segment does;
    scales of each b lie NEXT_B apart. Or, unless None, `places` says the number of each b in an overlapping (?, N, K),
    and then where its scales begin.
    """
    down, across = tl.load(ends + 2 * E - 1) // BM, tl.cdiv(N, BN)
    i = tl.arange(0, EP)
    stops = tl.load(ends + E + i, mask=i < E, other=2147483647)
    for p in tl.range(tl.program_id(0), down * across, PROGRAMS):
        im, jn = _place(p, down, across, PATCH)
        e = tl.sum((stops <= im * BM).to(tl.int32), axis=0)
        start = tl.load(ends + e - 1, mask=e > 0, other=0)
        row = start + im * BM - tl.load(ends + E + e - 1, mask=e > 0, other=0)
        here, added = of_a, None if bias is None else bias + e * N
        if SCALES == SEGMENT:
            here = of_a + e * NEXT_A
        elif SCALES == BLOCK:
            here = of_a + start.to(tl.int64) * (K // CHUNK)
        n, stop = jn * BN, tl.load(ends + e)
        if places is None:
            member, col, other = None, e * N + n, of_b + e * NEXT_B
        else:
            member, col, other = tl.load(places + e).to(tl.int32), n, of_b + tl.load(places + E + e)
        _tile(
            a, b, member, row, col, 0, K, out, n, start, stop, N, here, other, added, FAST, SCALES, SQUARE, BM, BN
        )  # fmt: skip


@functools.partial(kernel, unspecialized=("E", "PROGRAMS"))
def columns_kernel(
    a, b, out, ends, of_a, of_b, places, M, N, E, PROGRAMS, NEXT_A, NEXT_B,
    FAST: tl.constexpr, SCALES: tl.constexpr, SQUARE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PATCH: tl.constexpr, ALIGNED: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """a (M, W) times the transpose of b (N, W) over the columns of each segment -> (E, M, N).

    Scales of neighbouring segments are NEXT elements apart, or as many as a segment has chunks.
    If ALIGNED is not 0, each result begins `places` elements after the first one, a multiple of ALIGNED. With ADDS,
    the kernel adds to the old values.
    """
    down, across = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for p in tl.range(tl.program_id(0), E * down * across, PROGRAMS):
        e = p // (down * across)
        im, jn = _place(p % (down * across), down, across, PATCH)
        low, high = tl.load(ends + E + e - 1, mask=e > 0, other=0), tl.load(ends + E + e)
        here = out + (tl.multiple_of(tl.load(places + e), ALIGNED) if ALIGNED else e.to(tl.int64) * M * N)
        if SCALES == BLOCK:
            chunk = (low // CHUNK).to(tl.int64)
            left, right = of_a + chunk * M, of_b + chunk * (N // CHUNK if SQUARE else N)
        else:
            left, right = of_a + e * NEXT_A, of_b + e * NEXT_B
        m, n = im * BM, jn * BN
        _tile(
            a, b, None, m, n, low, high, here, n, 0, M, N, left, right, None, FAST, SCALES, SQUARE, BM, BN, ADDS
        )  # fmt: skip


@functools.partial(kernel, unspecialized=("E",))
def sums_kernel(x, out, ends, N, E, BM: tl.constexpr, BN: tl.constexpr):
    """The sums over the rows of each segment of x (M, N) -> (E, N), in fp32, rounded once."""
    across = tl.cdiv(N, BN)
    e, n = tl.program_id(0) // across, tl.program_id(0) % across * BN + tl.arange(0, BN)
    start, stop = tl.load(ends + e - 1, mask=e > 0, other=0), tl.load(ends + e)
    total = tl.zeros([BM, BN], tl.float32)
    for first in range(start, stop, BM):
        m = first + tl.arange(0, BM)
        inside = (m < stop)[:, None] & (n < N)[None, :]
        total += tl.load(x + m.to(tl.int64)[:, None] * N + n[None, :], mask=inside, other=0.0).to(tl.float32)
    result = tl.sum(total, axis=0)
    tl.store(out + e.to(tl.int64) * N + n, result.to(out.dtype.element_ty), mask=n < N)


SUMS = (32, 64)
"""Rows and columns that a program adds at a time."""
_SUMS = sums_kernel.bind({"BM": SUMS[0], "BN": SUMS[1]})


def sums(x: Tensor, segments: Segments) -> Tensor:
    """Sums over the rows of each segment: contiguous (M, N) -> (E, N)."""
    out = torch.empty((segments.count, x.shape[1]), dtype=x.dtype, device=x.device)
    programs = segments.count * -(-x.shape[1] // SUMS[1])
    _SUMS(programs, (x, out, segments.ends), (x.shape[1], segments.count))
    return out


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


class Scattered(NamedTuple):
    """E separate matrices (N, K) of codes as one overlapping tensor (count, N, K). It begins at the first in memory,
    and its entries are `step` elements apart. `places`, int64 (2 E,), has the entry of each matrix, then where its
    scales begin, in elements from the first scales in memory."""

    codes: Tensor
    count: int
    step: int
    places: Tensor


class GroupedProduct:
    """The two products of segments, for one accumulation and what has a scale: SEGMENT, LINE or BLOCK.

    Codes are FP8. Blocks are never fast: 1 x 128 ones of the first operand, of the second too or, `square`,
    128 x 128 ones.
    """

    @staticmethod
    def of_blocks(square: bool) -> "GroupedProduct":
        """The product of codes with scales of blocks."""
        return GroupedProduct(False, BLOCK.value, square)

    def __init__(self, fast: bool, scales: int, square: bool = False, tile: Tile | None = None) -> None:
        self.scales, self.tile = scales, tile or (BLOCK_TILE if scales == BLOCK.value else TILES[fast])
        self.constants = {"FAST": fast, "SCALES": scales, "SQUARE": square, "BM": self.tile.rows, "BN": self.tile.cols}
        self.rows_at_once = (
            self.tile.rows if fast or scales == BLOCK.value else self.tile.rows // 2
        )  # of a, as sums load them
        self._launches: dict[tuple[object, ...], Launch] = {}

    def of_rows(
        self,
        a: Tensor,
        b: Tensor | Scattered,
        scales: tuple[Tensor, Tensor],
        segments: Segments,
        dtype: torch.dtype,
        bias: Tensor | None = None,
    ) -> Tensor:
        """(M, K) by (E, N, K) -> (M, N). A bias (E, N) is of `dtype`.

        Scales are (E, 1), or (M,) and (E, N), or those of blocks: of each segment (K / 128, rows), and of each b
        (K / 128, N) or, square, (N / 128, K / 128). Of scattered b they are a tensor each, and this one the first.
        """
        codes, e, places = (b.codes, segments.count, b.places) if isinstance(b, Scattered) else (b, len(b), None)
        n, k = codes.shape[-2:]
        out = allocator(a)((a.shape[0], n), (n, 1), dtype)
        left = self._described(a, self.rows_at_once)
        if isinstance(b, Scattered):
            box = [1, self.tile.cols, CHUNK.value]
            right = Described(codes, [b.count, n, k], [b.step, k, 1], box)
        else:
            right = self._described(codes.view(e * n, k), self.tile.cols)
        programs = self._programs(a, segments.width // self.tile.rows * -(-n // self.tile.cols))
        first = scales[0].stride(0) if self.scales == SEGMENT.value else 0
        integers = n, k, e, programs, first, scales[1].stride(0)
        launch = self._launch(
            rows_kernel, a.dtype, codes.dtype, {"EP": segments.block}, bias is not None, places is not None
        )
        tensors = out, segments.ends, *scales, bias, places
        launch(programs, tensors, integers, descriptors=(left, right))
        return out

    def of_columns(
        self, a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], segments: Segments, dtype: torch.dtype
    ) -> Tensor:
        """(M, W) by (N, W) -> (E, M, N).

        Scales are (E, M) and (E, N), or (E, 1), or those of blocks: (W / 128, M), and (W / 128, N) or, square, of each
        segment (N / 128, columns / 128).
        """
        m, n = a.shape[0], b.shape[0]
        out = allocator(a)((segments.count, m, n), (m * n, n, 1), dtype)
        self.of_columns_into(a, b, scales, segments, out)
        return out

    def of_columns_into(
        self,
        a: Tensor,
        b: Tensor,
        scales: tuple[Tensor, Tensor],
        segments: Segments,
        out: Tensor,
        table: Table | None = None,
        adds: bool = False,
    ) -> None:
        """Write over `out` (E, M, N), or add to it. With a table, over the (M, N) that it names; `out` is the first."""
        m, n, e = a.shape[0], b.shape[0], segments.count
        programs = self._programs(a, e * -(-m // self.tile.rows) * -(-n // self.tile.cols))
        integers = m, n, e, programs, scales[0].stride(0), scales[1].stride(0)
        places, step = (None, 0) if table is None else (table.offsets, ALIGNED if table.aligned else 1)
        launch = self._launch(columns_kernel, a.dtype, b.dtype, {"ALIGNED": step, "ADDS": adds})
        operands = self._described(a, self.rows_at_once), self._described(b, self.tile.cols)
        launch(programs, (out, segments.ends, *scales, places), integers, descriptors=operands)

    def _programs(self, like: Tensor, tiles: int) -> int:
        return min(tiles, _multiprocessors(like.get_device())) if self.tile.walk else tiles

    def _described(self, matrix: Tensor, rows: int) -> Described:
        return Described(matrix, matrix.shape, matrix.stride(), [rows, CHUNK.value])

    def _launch(self, function: Kernel, a: torch.dtype, b: torch.dtype, more: dict[str, int], *present: bool) -> Launch:
        """`present` says which tensors are not None."""
        key = (function, a, b, *present, *more.values())
        result = self._launches.get(key)
        if result is None:
            constants = {**self.constants, "PATCH": self.tile.patch, **more}
            options = {"maxnreg": self.tile.registers} if self.tile.registers else {}
            result = self._launches[key] = function.bind(constants, self.tile.warps, self.tile.stages, options)
        return result
