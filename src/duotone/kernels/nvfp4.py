"""The NVFP4 cast of a contiguous matrix (M, K) to one plane or to both: E2M1 codes, two to a byte, E4M3 scales of
blocks of 16, and a global amax that an earlier kernel takes. Each plane has separate scales.

The columnwise plane is that of the transpose, written as (K, M). Each plane reads the tile, such that a thread has a
group of 16 elements along the contraction of the plane. The second read comes from a cache.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from duotone.formats import ErrorNorm
from duotone.kernels.activations import FusedProducer, materialize
from duotone.kernels.amax import PARTIALS, amax_along, larger, tensor_amax
from duotone.kernels.cast import NOT_KNOWN, MaybeParts, Scales, lines, measured
from duotone.kernels.e2m1 import along, dither_of, dithers, down, largest, packed, rounded, transformed
from duotone.kernels.launch import Constants, Launch, kernel
from duotone.kernels.tile_scales import ABSENT, LINE, SHARED, TENSOR
from duotone.kernels.two_level import SEARCHES, scales, spread


@kernel
def nvfp4_amax_kernel(
    x, plain, row, col, M, K,
    PLAIN: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, TM: tl.constexpr, TK: tl.constexpr,
    EVEN: tl.constexpr, EIGHTS: tl.constexpr, NAN: tl.constexpr,
):  # fmt: skip
    """Partial amaxes of x, and of its bf16 Hadamard transforms along rows and along columns. NaN counts as 0, or with
    NAN as infinite."""
    K = _multiple(K, EIGHTS)
    across = tl.cdiv(K, TK)
    of_plain = tl.zeros([TM // 16, TK], tl.float32)
    of_col = tl.zeros([TM // 16, TK], tl.float32)
    of_row = tl.zeros([TM, TK // 16], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(M, TM) * across, tl.num_programs(0)):
        pm, pk = tile // across, tile % across
        start = (pm * TM).to(tl.int64) * K + pk * TK
        if PLAIN or COL:
            v = down(x, start, M, K, pm, pk, TM, TK, EVEN)
            if PLAIN:
                of_plain = larger(of_plain, largest(v, NAN), NAN)
            if COL:
                of_col = larger(of_col, largest(transformed(x, v), NAN), NAN)
        if ROW:
            v = along(x, start, M, K, pm, pk, TM, TK, EVEN)
            of_row = larger(of_row, largest(transformed(x, v), NAN), NAN)
    if PLAIN:
        tl.store(plain + tl.program_id(0), _of_all(of_plain, NAN))
    if ROW:  # rounding keeps the order
        tl.store(row + tl.program_id(0), _of_all(of_row, NAN).to(tl.bfloat16).to(tl.float32))
    if COL:
        tl.store(col + tl.program_id(0), _of_all(of_col, NAN).to(tl.bfloat16).to(tl.float32))


@triton.jit
def _multiple(K, EIGHTS: tl.constexpr):
    """K. With EIGHTS the compiler learns that K is a multiple of 8, so that loads take 16 bytes."""
    if EIGHTS:
        K = K // 8 * 8
    return K


@triton.jit
def _of_all(magnitudes, NAN: tl.constexpr):
    """The largest of a tile's magnitudes."""
    return amax_along(amax_along(magnitudes, 1, NAN), 0, NAN)


@triton.jit
def _global(source, out, line, LINES, P, is_first, FROM: tl.constexpr, N: tl.constexpr):
    """The global amax, from partial amaxes, which the first tile stores; or the amaxes of the lines."""
    if FROM == LINE:
        result = tl.load(source + line, mask=line < LINES, other=0).to(tl.float32, bitcast=True)
    else:
        i = tl.arange(0, N)
        result = tl.max(tl.load(source + i, mask=i < P, other=0.0), axis=0)
        tl.store(out, result, mask=is_first)
    return result


@triton.jit
def _keep(out, low, high, at, mask):
    """Store the codes of whole groups."""
    whole = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
    tl.store(out.to(tl.pointer_type(tl.uint64)) + at, whole, mask=mask)


@triton.jit
def _keep_bytes(
    out, low, high, start, LINES, group, WIDTH, L: tl.constexpr, G: tl.constexpr, TURNED: tl.constexpr
):  # fmt: skip
    """Store the codes of L lines from `start` and G groups from `group`: the bytes within WIDTH of each line.

    Words are (L, G), or (G, L) with TURNED. Neighbouring threads store neighbouring bytes.
    """
    words = tl.join(low, high)
    if TURNED:
        words = tl.permute(words, [1, 0, 2])
    words = tl.reshape(words, [L, 2 * G])[:, :, None] >> (8 * tl.arange(0, 4)).to(tl.uint32)[None, None, :]
    line, byte = tl.arange(0, L)[:, None], 8 * group + tl.arange(0, 8 * G)[None, :]
    result = tl.reshape((words & 0xFF).to(tl.uint8), [L, 8 * G])
    tl.store(
        out + start.to(tl.int64) * WIDTH + (line * WIDTH + byte), result, mask=(start + line < LINES) & (byte < WIDTH)
    )


@triton.jit
def _dithers(seed, v, line, group, COLS, PLANE: tl.constexpr, RANDOM: tl.constexpr, WORDS: tl.constexpr):
    """The random bytes of groups of a plane of COLS columns. Without RANDOM the values do not matter."""
    result = v
    if RANDOM:
        if WORDS:
            # The condition is always true. It makes the random numbers and the elements of a group meet in one thread.
            number = tl.where(largest(v, False) >= 0.0, line.to(tl.int64) * tl.cdiv(COLS, 16) + group, 0)
            result = dithers(seed, number, PLANE)
        else:
            element = line.to(tl.int64) * COLS + 16 * group
            result = (dither_of(seed, element, PLANE),)
            for j in tl.static_range(1, 16):
                result += (dither_of(seed, element + j, PLANE),)
    return result


@triton.jit
def _dithers_below(seed, m, k, K, WORDS: tl.constexpr):
    """The random bytes of the rowwise plane, for groups along columns that start at rows m."""
    cols = tl.cdiv(K, 16) * 16 if WORDS else K
    element = m.to(tl.int64) * cols + k
    result = (dither_of(seed, element, 0),)
    for j in tl.static_range(1, 16):
        result += (dither_of(seed, element + j * cols, 0),)
    return result


@triton.jit
def _row_plane(
    x, codes, kept_scales, kept_amax, source, seed, M, K, P, top, pm, pk,
    FROM: tl.constexpr, SQUARE: tl.constexpr, ROTATED: tl.constexpr, RANDOM: tl.constexpr, SEARCH: tl.constexpr,
    WORDS: tl.constexpr, TM: tl.constexpr, TK: tl.constexpr, EVEN: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Store a tile of the rowwise plane. Returns its scales and multipliers, one a block."""
    G: tl.constexpr = TK // 16
    im, ig = tl.arange(0, TM)[:, None], tl.arange(0, G)[None, :]
    m, g, wide = pm * TM + im, pk * G + ig, tl.cdiv(K, 16)
    v = along(x, (pm * TM).to(tl.int64) * K + pk * TK, M, K, pm, pk, TM, TK, EVEN)
    if ROTATED:
        v = rounded(transformed(x, v))
    amax = _global(source, kept_amax, m, M, P, (pm == 0) & (pk == 0), FROM, N)
    byte, q = scales(v, amax, top, SEARCH, TM, G, SQUARE)
    at = (pm * TM).to(tl.int64) * wide + pk * G + (im * wide + ig)
    tl.store(kept_scales + at, spread(byte, TM, G, SQUARE), mask=(m < M) & (g < wide))
    dither = _dithers(seed, v, m, g, K, 0, RANDOM, WORDS)
    low, high = packed(v, spread(q, TM, G, SQUARE), dither, RANDOM)
    if WORDS:
        _keep(codes, low, high, at, (m < M) & (g < wide))
    else:
        _keep_bytes(codes, low, high, pm * TM, M, pk * G, tl.cdiv(K, 2), TM, G, False)
    return byte, q


@triton.jit
def _col_plane(
    x, codes, kept_scales, kept_amax, source, seed, byte, q, M, K, P, top, pm, pk,
    FROM: tl.constexpr, SQUARE: tl.constexpr, ROTATED: tl.constexpr, RANDOM: tl.constexpr, SEARCH: tl.constexpr,
    WORDS: tl.constexpr, ROW_WORDS: tl.constexpr, TM: tl.constexpr, TK: tl.constexpr, EVEN: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Store a tile of the columnwise plane. With SHARED, `byte` and `q` of `_row_plane` are its scales too."""
    H: tl.constexpr = TM // 16
    ih, ik = tl.arange(0, H)[:, None], tl.arange(0, TK)[None, :]
    h, k, deep = pm * H + ih, pk * TK + ik, tl.cdiv(M, 16)
    v = down(x, (pm * TM).to(tl.int64) * K + pk * TK, M, K, pm, pk, TM, TK, EVEN)
    if ROTATED:
        v = rounded(transformed(x, v))
    amax = _global(source, kept_amax, k, K, P, (pm == 0) & (pk == 0), FROM, N)
    if FROM == SHARED:
        dither = v
        if RANDOM:
            dither = _dithers_below(seed, 16 * h, k, K, ROW_WORDS)
    else:
        byte, q = scales(v, amax, top, SEARCH, H, TK, SQUARE)
        dither = _dithers(seed, v, k, h, M, 1, RANDOM, WORDS)
    at = (pk * TK).to(tl.int64) * deep + pm * H + (ik * deep + ih)
    tl.store(kept_scales + at, spread(byte, H, TK, SQUARE), mask=(k < K) & (h < deep))
    low, high = packed(v, spread(q, H, TK, SQUARE), dither, RANDOM)
    if WORDS:
        _keep(codes, low, high, at, (k < K) & (h < deep))
    else:
        _keep_bytes(codes, low, high, pk * TK, K, pm * H, tl.cdiv(M, 2), TK, H, True)


@functools.partial(kernel, unspecialized=("P",))
def nvfp4_kernel(
    x, row_codes, row_scales, row_amax, row_from, col_codes, col_scales, col_amax, col_from, seed, M, K, P,
    row_top, col_top,
    ROW: tl.constexpr, ROW_SQUARE: tl.constexpr, ROW_ROTATED: tl.constexpr, ROW_RANDOM: tl.constexpr,
    ROW_SEARCH: tl.constexpr, ROW_WORDS: tl.constexpr,
    COL: tl.constexpr, COL_SQUARE: tl.constexpr, COL_ROTATED: tl.constexpr, COL_RANDOM: tl.constexpr,
    COL_SEARCH: tl.constexpr, COL_WORDS: tl.constexpr,
    TM: tl.constexpr, TK: tl.constexpr, EVEN: tl.constexpr, EIGHTS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One tile of the planes that are not ABSENT. `row_top` and `col_top` are the largest element times block_max."""
    K = _multiple(K, EIGHTS)
    across = tl.cdiv(K, TK)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # from the end: the amaxes read it last, so L2 still holds it
    pm, pk = tile // across, tile % across
    value = tl.load(seed) if ROW_RANDOM or COL_RANDOM else 0
    byte, q = 0, 0.0
    if ROW != ABSENT:
        byte, q = _row_plane(
            x, row_codes, row_scales, row_amax, row_from, value, M, K, P, row_top, pm, pk,
            ROW, ROW_SQUARE, ROW_ROTATED, ROW_RANDOM, ROW_SEARCH, ROW_WORDS, TM, TK, EVEN, N,
        )  # fmt: skip
    if COL != ABSENT:
        _col_plane(
            x, col_codes, col_scales, col_amax, col_from, value, byte, q, M, K, P, col_top, pm, pk,
            COL, COL_SQUARE, COL_ROTATED, COL_RANDOM, COL_SEARCH, COL_WORDS, ROW_WORDS, TM, TK, EVEN, N,
        )  # fmt: skip


class PlaneSpec(NamedTuple):
    """What the kernels have to know about a plane's format."""

    square: bool
    """Blocks of 16 x 16 instead of 1 x 16."""

    rotated: bool
    random: bool
    search: ErrorNorm | None
    """The error that decides whether the amax of a block becomes 6 or 4. None: always 6."""

    per_line: bool
    top: float
    """The largest element times the E4M3 value that the scale of the largest block takes."""


TILE = (64, 64, 4)
"""Rows and columns of a tile, and warps."""
AMAX_TILE = (64, 128, 8)


class Cast:
    """The cast to a rowwise plane, a columnwise plane, or both. `shared`: the second is the first one, transposed.

    With `propagate`, NaN counts as infinite in a global amax. An infinite global amax makes every product non-finite.
    """

    over = None

    def __init__(self, row: PlaneSpec | None, col: PlaneSpec | None, shared: bool, propagate: bool = True) -> None:
        self.row, self.col, self.propagate = row, col, propagate
        self.sources = _source(row), SHARED.value if shared else _source(col)
        specs = [spec for spec in (row, col) if spec is not None]
        self.is_random = any(spec.random for spec in specs)
        self.needs_lines = any(spec.per_line for spec in specs)
        self.needs_amaxes = (
            any(not (spec.rotated or spec.per_line) for spec in specs),
            row is not None and row.rotated,
            col is not None and col.rotated,
        )
        self.floats = tuple(1.0 if spec is None else spec.top for spec in (row, col))
        self._bound = functools.cache(self._bind)

    def produced(
        self, producer: FusedProducer, scales: Scales, live: Tensor | None, *seed: Tensor | None, typed: bool = False
    ) -> tuple[MaybeParts, MaybeParts]:
        """Like a call, for a matrix that is materialized first: the cast needs its amax."""
        return self(materialize(producer), scales, live, NOT_KNOWN, *seed, typed=typed)

    def __call__(
        self,
        x: Tensor,
        scales: Scales = (None, None),
        live: Tensor | None = None,
        amaxes: Scales = NOT_KNOWN,
        seed: Tensor | None = None,
        *,
        typed: bool = False,
    ) -> tuple[MaybeParts, MaybeParts]:
        """The parts of both planes of contiguous (M, K); `seed` int64 if a plane rounds stochastically.

        `amaxes` are as for `cast.Cast`. `scales`, `live` and `typed` have no effect: no plane is delayed, and codes
        have no dtype of torch.
        """
        del scales, live, typed
        m, k = x.shape
        count, of_row, of_col = self._amaxes(x, amaxes)
        row, col = _empty(self.row, x, m, k, of_row), _empty(self.col, x, k, m, of_col)
        tm, tk, _ = TILE
        whole = (_is_whole(*of) for of in ((self.row, k), (self.col, m)))
        launch = self._bound(not (m % tm or k % tk), k % 16 == 8, *whole)
        tensors = (x, *_buffers(row), of_row, *_buffers(col), of_col, seed if self.is_random else None)
        launch(-(-m // tm) * -(-k // tk), tensors, (m, k, count), self.floats)
        return row, col

    def measure(self, x: Tensor, dim: int) -> tuple[Scales, list[bool]]:
        """As `cast.Cast.measure`."""
        return measured(x, self.sources, self._amaxes(x, NOT_KNOWN)[1:], dim)

    def _amaxes(self, x: Tensor, amaxes: Scales) -> tuple[int, Tensor | None, Tensor | None]:
        """The number of partial amaxes, and those of each plane; or the bits of the amaxes of its lines."""
        of_lines = lines(x, self.sources, amaxes, self.propagate) if self.needs_lines else NOT_KNOWN
        is_known = all(
            amax is not None or source != TENSOR.value for amax, source in zip(amaxes, self.sources, strict=True)
        )
        count, of_planes = (1, amaxes) if is_known else self._partial(x)
        of_row, of_col = (
            of_line if source == LINE.value else amax
            for of_line, amax, source in zip(of_lines, of_planes, self.sources, strict=True)
        )
        return count, of_row, of_row if self.sources[1] == SHARED.value else of_col

    def _partial(self, x: Tensor) -> tuple[int, Scales]:
        """The number of partial amaxes, and those of each plane: of the matrix, or of what is rotated for the plane."""
        (m, k), (tm, tk, _) = x.shape, AMAX_TILE
        if not any(self.needs_amaxes[1:]):
            amax = tensor_amax(x, self.propagate)
            return amax.numel(), (amax, amax)
        count = min(-(-m // tm) * -(-k // tk), PARTIALS)
        each = torch.empty((3, PARTIALS), dtype=torch.float32, device=x.device)
        plain, row, col = (
            part[:count] if need else None for part, need in zip(each.unbind(), self.needs_amaxes, strict=True)
        )
        launch = _amax(*self.needs_amaxes, not (m % tm or k % tk), k % 16 == 8, self.propagate)
        launch(count, (x, plain, row, col), (m, k))
        return count, (plain if row is None else row, plain if col is None else col)

    def _bind(self, even: bool, eights: bool, row_words: bool, col_words: bool) -> Launch:
        tm, tk, warps = TILE
        constants = {
            **_constants("ROW", self.sources[0], self.row, 1, row_words),
            **_constants("COL", self.sources[1], self.col, 2, col_words),
            **{"TM": tm, "TK": tk, "EVEN": even, "EIGHTS": eights, "N": PARTIALS},
        }
        return nvfp4_kernel.bind(constants, warps, options=SEPARATE)


SEPARATE = {"enable_fp_fusion": False}
"""Each operation is rounded by itself."""


@functools.cache
def _amax(plain: bool, row: bool, col: bool, even: bool, eights: bool, nan: bool) -> Launch:
    tm, tk, warps = AMAX_TILE
    constants = {"PLAIN": plain, "ROW": row, "COL": col, "TM": tm, "TK": tk}
    constants |= {"EVEN": even, "EIGHTS": eights, "NAN": nan}
    return nvfp4_amax_kernel.bind(constants, warps)


def _source(spec: PlaneSpec | None) -> int:
    if spec is None:
        return ABSENT.value
    return LINE.value if spec.per_line else TENSOR.value


def _is_whole(spec: PlaneSpec | None, cols: int) -> bool:
    """Whether all groups of a plane have 16 elements. Then their codes are stored as words."""
    return spec is None or spec.rotated or cols % 16 == 0


def _constants(side: str, source: int, spec: PlaneSpec | None, square: int, words: bool) -> Constants:
    plane = spec or PlaneSpec(False, False, False, None, False, 1.0)
    return {
        side: source,
        f"{side}_SQUARE": square if plane.square else 0,
        f"{side}_ROTATED": plane.rotated,
        f"{side}_RANDOM": plane.random,
        f"{side}_SEARCH": SEARCHES[plane.search],
        f"{side}_WORDS": words,
    }


def _empty(spec: PlaneSpec | None, x: Tensor, m: int, k: int, amax: Tensor | None) -> dict[str, Tensor] | None:
    """The parts of a plane (M, K)."""
    if spec is None:
        return None
    groups, device = -(-k // 16), x.device
    width = 8 * groups if spec.rotated else -(-k // 2)
    return {
        "codes": torch.empty((m, width), dtype=torch.uint8, device=device),
        "scale": torch.empty((m, groups), dtype=torch.uint8, device=device),
        "amax": amax[:m].view(torch.float32)
        if spec.per_line and amax is not None
        else torch.empty((1,), dtype=torch.float32, device=device),
    }


def _buffers(parts: dict[str, Tensor] | None) -> tuple[Tensor | None, ...]:
    """Codes, scales, and the memory for the global amax."""
    if parts is None:
        return None, None, None
    return parts["codes"], parts["scale"], parts["amax"]
