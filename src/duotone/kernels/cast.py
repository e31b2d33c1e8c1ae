"""The cast of a contiguous matrix (M, K) to one plane or to both, in one read.

A plane's scale is given (delayed), follows from amaxes taken before (per tensor, per row), or from the tile itself
(blocks). The columnwise plane is written transposed, (K, M), so that its contraction lies next to each other.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from duotone.kernels.activations import NO_NORM, NOTHING, Produced, fits, produce, produced
from duotone.kernels.amax import PARTIALS, known, line_amax, tensor_amax
from duotone.kernels.launch import Launch, kernel
from duotone.kernels.scaling import CODECS
from duotone.kernels.tile_scales import (
    ABSENT,
    BLOCK,
    GIVEN,
    LINE,
    SHARED,
    TENSOR,
    column_scales,
    one_scale,
    row_lines,
    scale_of_rows,
    square_scales,
)


@triton.jit
def existing(i, rows, j, cols, EVEN: tl.constexpr):
    """Which elements exist; None where all do."""
    if EVEN:
        made = None
    else:
        made = (i < rows) & (j < cols)
    return made


@triton.jit
def codes_of(value, ELEMENT: tl.constexpr):
    """The conversion saturates, and gives NaN without a sign."""
    return value.to(ELEMENT).to(tl.uint8, bitcast=True)


@triton.jit
def record(live, below):
    """Enlarge `live` to the amax of a tile; most tiles find a larger one there and leave the address alone."""
    largest = known(tl.max(tl.max(below, axis=1), axis=0)).to(tl.int32, bitcast=True)
    tl.atomic_max(live, largest, mask=largest > tl.load(live), sem="relaxed")


@triton.jit
def store_turned(
    values, scale, codes, stride, pm, pk, M, K,
    ELEMENT: tl.constexpr, EVEN: tl.constexpr, H: tl.constexpr, TK: tl.constexpr,
):  # fmt: skip
    """The codes of a tile, transposed, into (K, M): four rows of a thread become one word of a row of the transpose."""
    v0, v1, v2, v3 = values
    fours = tl.join(tl.join(v0 * scale, v2 * scale), tl.join(v1 * scale, v3 * scale))
    made = codes_of(tl.reshape(fours, [H, TK, 4]), ELEMENT)
    made = tl.reshape(tl.permute(made, [1, 0, 2]), [TK, 4 * H])
    im, ik = tl.arange(0, 4 * H)[None, :], tl.arange(0, TK)[:, None]
    out = codes + (pk * TK).to(tl.int64) * stride + pm * 4 * H + (ik * stride + im)
    tl.store(out, made, mask=existing(pk * TK + ik, K, pm * 4 * H + im, M, EVEN))


@triton.jit
def _next_tile(across, BACKWARDS: tl.constexpr):
    """Which tile is next; from the end behind amaxes, which read that last, so that L2 still holds it."""
    tile = tl.program_id(0)
    if BACKWARDS:
        tile = tl.num_programs(0) - 1 - tile
    return tile // across, tile % across


@functools.partial(kernel, unspecialized=("P",))
def cast_kernel(
    x, z, mean, rstd, gamma, beta, row_codes, row_scales, col_codes, col_scales, row_from, col_from, live, M, K, P,
    row_largest, row_overflow, row_epsilon, col_largest, col_overflow, col_epsilon,
    ROW: tl.constexpr, ROW_ELEMENT: tl.constexpr, ROW_R: tl.constexpr, ROW_C: tl.constexpr, ROW_CODEC: tl.constexpr,
    COL: tl.constexpr, COL_ELEMENT: tl.constexpr, COL_R: tl.constexpr, COL_C: tl.constexpr, COL_CODEC: tl.constexpr,
    WHAT: tl.constexpr, ACT: tl.constexpr, RECORD: tl.constexpr,
    TM: tl.constexpr, TK: tl.constexpr, EVEN: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One tile of the matrix that is made of x and z, or the norm: its amax where needed, codes and scales of planes.

    `row_from` and `col_from` hold an encode scale or amaxes; the amax of the matrix goes into `live` where RECORD.
    Blocks are ROW_R x ROW_C and COL_R x COL_C as they lie in x. A thread holds four rows below each other, so that
    the transposed codes move through shared memory as words.
    """
    H: tl.constexpr = TM // 4
    SQUARE: tl.constexpr = ROW == BLOCK and ROW_R > 1
    pm, pk = _next_tile(tl.cdiv(K, TK), ROW == TENSOR or ROW == LINE or COL == TENSOR or COL == LINE)
    i, k = 4 * tl.arange(0, H)[:, None], (pk * TK + tl.arange(0, TK))[None, :]
    m, row, first, norm = pm * TM + i, (pm * TM).to(tl.int64), pk * TK < K // 2, (mean, rstd, gamma, beta)
    v0 = produced(x, z, norm, row, i, k, first, M, K, existing(m, M, k, K, EVEN), WHAT, ACT)
    v1 = produced(x, z, norm, row + 1, i, k, first, M, K, existing(m + 1, M, k, K, EVEN), WHAT, ACT)
    v2 = produced(x, z, norm, row + 2, i, k, first, M, K, existing(m + 2, M, k, K, EVEN), WHAT, ACT)
    v3 = produced(x, z, norm, row + 3, i, k, first, M, K, existing(m + 3, M, k, K, EVEN), WHAT, ACT)
    values = (v0, v1, v2, v3)
    below = tl.maximum(tl.maximum(tl.abs(v0), tl.abs(v1)), tl.maximum(tl.abs(v2), tl.abs(v3)))

    if RECORD:
        record(live, below)

    row_scale = 1.0
    if ROW == GIVEN or ROW == TENSOR:
        row_scale = one_scale(
            row_from, row_scales, P, pm, pk, row_largest, row_overflow, row_epsilon, ROW, ROW_CODEC, N
        )  # fmt: skip
    elif SQUARE:
        row_scale = square_scales(
            below, row_scales, col_scales, pm, pk, M, K, row_largest, row_overflow, row_epsilon,
            COL == SHARED, ROW_R, ROW_C, ROW_CODEC, False, H, TK,
        )  # fmt: skip
    if ROW != ABSENT:
        lines = row_lines(
            row_from, row_scales, pm * TM, M, pk == 0, row_largest, row_overflow, row_epsilon, ROW, ROW_CODEC, H
        )  # fmt: skip
        for j in tl.static_range(4):
            row_scale = scale_of_rows(
                row_scale, lines[j], values[j], row_scales, m + j, M, K, pk, row_largest, row_overflow, row_epsilon,
                ROW, ROW_R, ROW_C, ROW_CODEC, H, TK,
            )  # fmt: skip
            codes = codes_of(values[j] * row_scale, ROW_ELEMENT)
            tl.store(row_codes + (row + j) * K + (i * K + k), codes, mask=existing(m + j, M, k, K, EVEN))

    if COL != ABSENT:
        scale = row_scale
        if COL != SHARED:
            scale = column_scales(
                below, col_from, col_scales, P, pm, pk, M, K, col_largest, col_overflow, col_epsilon,
                COL, COL_R, COL_C, COL_CODEC, H, TK, N,
            )  # fmt: skip
        store_turned(values, scale, col_codes, M, pm, pk, M, K, COL_ELEMENT, EVEN, H, TK)


class PlaneSpec(NamedTuple):
    """What the kernel has to know of a plane's format; blocks are (rows, cols) of the plane, 0 for the whole extent."""

    element: torch.dtype
    rows: int
    cols: int
    codec: str
    largest: float
    """The element's largest value, or its reciprocal under E8M0 scales."""

    overflow: float
    epsilon: float
    is_delayed: bool


ELEMENTS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
LINEAR, NARROW, BLOCKED = (64, 128, 4), (32, 128, 1), (128, 128, 4)
"""Tiles and warps: one scale or one per line, blocks of at most 32 in both directions, wider ones."""


Given = tuple[Tensor | None, Tensor | None]
Made = dict[str, Tensor] | None


class Cast:
    """The cast to a rowwise plane, a columnwise plane, or both; `shared` where the second is the first, transposed."""

    def __init__(self, row: PlaneSpec | None, col: PlaneSpec | None, shared: bool) -> None:
        self.row, self.col, self.shared = row, col, shared
        self.sources = _source(row), SHARED.value if shared else _source(col)
        self.needs_amax, self.needs_lines = TENSOR.value in self.sources, LINE.value in self.sources
        self.shares_scale = shared and self.sources[0] != BLOCK.value
        self.tile = _tile(self.sources, row, col)
        self.floats = *_limits(row), *_limits(col)
        self._launches: dict[Any, Launch] = {}

    def __call__(self, x: Tensor, scales: Given = (None, None), live: Tensor | None = None) -> tuple[Made, Made]:
        """The parts of both planes of contiguous (M, K). `scales` are those of delayed planes, fp32 (1,).

        `live`, the bits of an fp32 amax as int32 (1,), becomes that of x where this is larger.
        """
        count = 0
        if self.needs_amax:
            partial = tensor_amax(x)
            count = partial.numel()
            scales = self._given(scales, TENSOR.value, partial, partial)
        if self.needs_lines:
            scales = self._given(scales, LINE.value, *line_amax(x))
        return self._enqueue((x, None, *NO_NORM), x.shape, (NOTHING.value, 0), (*scales, live), count)

    def produced(self, made: Produced, scales: Given = (None, None), live: Tensor | None = None) -> tuple[Made, Made]:
        """As a call, of a matrix that is made on the way, where no amax of it has to be known before.

        The amax of a norm is, from the kernel that takes its statistics; those of its lines are not.
        """
        if self.needs_lines or (self.needs_amax and made.norm is None) or not fits(made, self.tile[1]):
            return self(produce(made), scales, live)
        count = 0
        if self.needs_amax:
            amax = made.norm.measure_amax()
            count = amax.numel()
            scales = self._given(scales, TENSOR.value, amax, amax)
        elif made.norm is not None:
            made.norm.measure()
        return self._enqueue(made.tensors, made.shape, (made.what, made.act), (*scales, live), count)

    def _given(self, scales: Given, source: int, row: Tensor, col: Tensor) -> Given:
        """`scales`, with the amaxes `row` and `col` for planes whose scale comes from `source`."""
        of_row, of_col = scales
        return row if self.sources[0] == source else of_row, col if self.sources[1] == source else of_col

    def _enqueue(
        self,
        inputs: tuple[Any, ...],
        shape: tuple[int, ...],
        what: tuple[int, int],
        sources: tuple[Tensor | None, ...],
        count: int,
    ) -> tuple[Made, Made]:
        m, k = shape
        x = inputs[0]
        row = col = row_codes = row_scale = col_codes = col_scale = None
        if self.row is not None:
            row_codes, row_scale = _empty(self.row, x, m, k)
            row = {"codes": row_codes, "scale": row_scale}
        if self.col is not None:
            col_codes, col_scale = _empty(self.col, x, k, m, row_scale if self.shares_scale else None)
            col = {"codes": col_codes, "scale": col_scale}
        tm, tk, _ = self.tile
        variant = (not (m % tm or k % tk), sources[2] is not None, what)
        launch = self._launches.get(variant)
        if launch is None:
            launch = self._launches[variant] = self._bind(*variant)
        tensors = (*inputs, row_codes, row_scale, col_codes, col_scale, *sources)
        launch(-(-m // tm) * -(-k // tk), tensors, (m, k, count), self.floats)
        return row, col

    def _bind(self, even: bool, record: bool, what: tuple[int, int]) -> Launch:
        tm, tk, warps = self.tile
        constants = {
            **_constants("ROW", self.sources[0], self.row, turned=False),
            **_constants("COL", self.sources[1], self.col, turned=True),
            **{"WHAT": what[0], "ACT": what[1], "RECORD": record, "TM": tm, "TK": tk, "EVEN": even, "N": PARTIALS},
        }
        # Masks and activations take registers.
        return cast_kernel.bind(constants, warps if even and what[0] == NOTHING.value else 2 * warps)


def _constants(side: str, source: int, spec: PlaneSpec | None, turned: bool) -> dict[str, Any]:
    """What the kernel is told of a plane; its blocks as they lie in x."""
    rows, cols = (1, 1) if spec is None else (spec.rows or 1, spec.cols or 1)
    return {
        side: source,
        f"{side}_ELEMENT": tl.float8e4nv if spec is None else ELEMENTS[spec.element],
        f"{side}_R": cols if turned else rows,
        f"{side}_C": rows if turned else cols,
        f"{side}_CODEC": 0 if spec is None else CODECS[spec.codec],
    }


def _tile(sources: tuple[int, int], row: PlaneSpec | None, col: PlaneSpec | None) -> tuple[int, int, int]:
    """Rows and columns of a tile, which holds whole blocks, and warps."""
    if BLOCK.value not in sources:
        return LINEAR
    widest = max(n for spec in (row, col) if spec is not None for n in (spec.rows, spec.cols))
    return NARROW if widest <= NARROW[0] else BLOCKED


def _source(spec: PlaneSpec | None) -> int:
    if spec is None:
        return ABSENT.value
    if spec.is_delayed:
        return GIVEN.value
    return {(0, 0): TENSOR, (1, 0): LINE}.get((spec.rows, spec.cols), BLOCK).value


def _limits(spec: PlaneSpec | None) -> tuple[float, float, float]:
    return (1.0, 1.0, 0.0) if spec is None else (spec.largest, spec.overflow, spec.epsilon)


def _empty(spec: PlaneSpec, x: Tensor, m: int, k: int, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes and, unless given, scales of a plane (M, K); those of a column of 1 x C blocks lie together."""
    device = x.device
    codes = torch.empty(m, k, dtype=torch.uint8, device=device)
    if scale is not None:
        return codes, scale
    dtype = torch.uint8 if spec.codec == "e8m0" else torch.float32
    if spec.rows == 0:
        return codes, torch.empty(1, dtype=dtype, device=device)
    down, across = -(-m // spec.rows), -(-k // spec.cols) if spec.cols else 1
    if spec.rows == 1 and across > 1:
        return codes, torch.empty(across, down, dtype=dtype, device=device).t()
    return codes, torch.empty(down, across, dtype=dtype, device=device)
