"""The cast of a contiguous matrix (M, K) to one plane or to both, in one read.

A plane's scale is given (delayed), follows from amaxes taken before (per tensor, per row), or from the tile itself
(blocks).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from duotone.formats import ScaleCodec
from duotone.formats.geometry import Shard
from duotone.kernels.activations import GATED_SLOPE, NO_NORM, NORMED, NOTHING, FusedProducer, materialize
from duotone.kernels.amax import PARTIALS, line_amax, tensor_amax
from duotone.kernels.elements import ELEMENTS, is_packed, is_small
from duotone.kernels.launch import Constants, Launch
from duotone.kernels.scaling import CODECS, HIDES
from duotone.kernels.tile_scales import ABSENT, BLOCK, LINE, OUTSIDE, SHARED, TENSOR
from duotone.kernels.tiles import cast_kernel


class PlaneSpec(NamedTuple):
    """What the kernel has to know of a plane's format; blocks are (rows, cols) of the plane, 0 for the whole extent."""

    element: torch.dtype | str
    """A key of `kernels.elements.ELEMENTS`."""

    rows: int
    cols: int
    codec: ScaleCodec
    largest: float
    """The element's largest value, or its reciprocal under E8M0 scales."""

    overflow: float
    epsilon: float
    is_delayed: bool


LINEAR, NARROW, BLOCKED = (64, 128, 4), (32, 128, 1), (128, 128, 4)
"""Tiles and warps: one scale or one per line, blocks of at most 32 in both directions, wider ones."""

ACTIVATED = {LINEAR: (64, 64, 4), NARROW: (32, 128, 2), BLOCKED: (128, 128, 4)}
"""Those of activations and their gradients, which take registers."""

GATED = {LINEAR: (64, 64, 4), NARROW: (32, 128, 4), BLOCKED: (128, 128, 8)}
"""Those of gated gradients, two tiles to a program."""


Scales = tuple[Tensor | None, Tensor | None]
MaybeParts = dict[str, Tensor] | None


class Cast:
    """The cast to a rowwise plane, a columnwise plane, or both; `shared` where the second is the first, transposed.

    With `propagate`, infinities become NaN codes under a given scale, and else NaN scales; without it they saturate.
    """

    def __init__(self, row: PlaneSpec | None, col: PlaneSpec | None, shared: bool, propagate: bool = True) -> None:
        self.row, self.col, self.shared, self.propagate = row, col, shared, propagate
        self.sources = _source(row), SHARED.value if shared else _source(col)
        self.needs_amax, self.needs_lines = TENSOR.value in self.sources, LINE.value in self.sources
        self.shares_scale = shared and self.sources[0] != BLOCK.value
        self.marks = propagate and OUTSIDE.value in self.sources
        self.tile = _tile(self.sources, row, col)
        self.floats = *_limits(row), *_limits(col)
        self._launches: dict[tuple[bool, bool, tuple[int, int]], Launch] = {}

    def __call__(
        self,
        x: Tensor,
        scales: Scales = (None, None),
        live: Tensor | None = None,
        shard: Shard | None = None,
    ) -> tuple[MaybeParts, MaybeParts]:
        """The parts of both planes of contiguous (M, K). `scales` are those of delayed planes, fp32 (1,).

        `live`, the bits of an fp32 amax as int32 (1,), becomes that of x if this is larger. If x is a shard,
        amaxes of the sharded dimension are those of all shards.
        """
        return self._of(x, tensor_amax(x) if self.needs_amax else None, scales, live, shard)

    def produced(
        self, producer: FusedProducer, scales: Scales = (None, None), live: Tensor | None = None
    ) -> tuple[MaybeParts, MaybeParts]:
        """As a call, of a matrix that is made on the way; where its amax has to be known before, that is taken as it is
        made. The amax of a norm follows from its statistics."""
        if self.needs_lines or not self._fits(producer):
            return self(materialize(producer), scales, live)
        amax = None
        if self.needs_amax and producer.norm is None:
            amax = torch.zeros(1, dtype=torch.int32, device=producer.x.device)
            return self._of(materialize(producer, amax), amax.view(torch.float32), scales, live)
        if self.needs_amax:
            amax = producer.norm.measure_amax()
        elif producer.norm is not None:
            producer.norm.measure()
        scales, count = self._with(scales, TENSOR.value, amax, amax), 0 if amax is None else amax.numel()
        return self._enqueue(producer.tensors, producer.shape, (producer.what, producer.act), (*scales, live), count)

    def _of(
        self,
        x: Tensor,
        amax: Tensor | None,
        scales: Scales,
        live: Tensor | None,
        shard: Shard | None = None,
    ) -> tuple[MaybeParts, MaybeParts]:
        """The planes of x from its partial amaxes, if those are needed."""
        scales = self._with(scales, TENSOR.value, amax, amax)
        if self.needs_lines:
            scales = self._with(scales, LINE.value, *line_amax(x))
        count = 0 if amax is None else amax.numel()
        if shard is not None:
            scales = of_shards(shard, self.sources, scales, x.shape)
            count = min(count, 1)
        return self._enqueue((x, None, *NO_NORM), x.shape, (NOTHING.value, 0), (*scales, live), count)

    def _fits(self, producer: FusedProducer) -> bool:
        """Whether no tile lies in both halves of a gated gradient."""
        return producer.what != GATED_SLOPE.value or not producer.shape[1] // 2 % GATED[self.tile][1]

    def _with(self, scales: Scales, source: int, row: Tensor | None, col: Tensor | None) -> Scales:
        """`scales`, with the amaxes `row` and `col` for planes whose scale comes from `source`."""
        of_row, of_col = scales
        return row if self.sources[0] == source else of_row, col if self.sources[1] == source else of_col

    def _enqueue(
        self,
        inputs: tuple[Tensor | None, ...],
        shape: tuple[int, ...],
        what: tuple[int, int],
        sources: tuple[Tensor | None, ...],
        count: int,
    ) -> tuple[MaybeParts, MaybeParts]:
        m, k = shape
        x = inputs[0]
        assert x is not None
        row = col = row_codes = row_scale = col_codes = col_scale = None
        if self.row is not None:
            row_codes, row_scale = _empty(self.row, x, m, k)
            row = {"codes": row_codes, "scale": row_scale}
        if self.col is not None:
            col_codes, col_scale = _empty(self.col, x, k, m, row_scale if self.shares_scale else None)
            col = {"codes": col_codes, "scale": col_scale}
        tm, tk, _ = tile = self._tile_for(what[0])
        variant = (not (m % tm or k % tk), sources[2] is not None, what)
        launch = self._launches.get(variant)
        if launch is None:
            launch = self._launches[variant] = self._bind(*variant, tile)
        tensors = (*inputs, row_codes, row_scale, col_codes, col_scale, *sources)
        wide = k // 2 if what[0] == GATED_SLOPE.value else k
        launch(-(-m // tm) * -(-wide // tk), tensors, (m, k, count), self.floats)
        return row, col

    def _tile_for(self, what: int) -> tuple[int, int, int]:
        if what in (NOTHING.value, NORMED.value):
            return self.tile
        return (GATED if what == GATED_SLOPE.value else ACTIVATED)[self.tile]

    def _bind(self, even: bool, record: bool, what: tuple[int, int], tile: tuple[int, int, int]) -> Launch:
        tm, tk, warps = tile
        constants = {
            **plane_constants("ROW", self.sources[0], self.row, self.propagate),
            **plane_constants("COL", self.sources[1], self.col, self.propagate),
            **_blocks("ROW", self.row, turned=False),
            **_blocks("COL", self.col, turned=True),
            **{"MARKS": self.marks},
            **{"WHAT": what[0], "ACT": what[1], "RECORD": record, "TM": tm, "TK": tk, "EVEN": even, "N": PARTIALS},
        }
        # Masks, the statistics of norms, and elements that the hardware does not convert to take registers.
        small = any(is_small(ELEMENTS[spec.element]) for spec in (self.row, self.col) if spec is not None)
        return cast_kernel.bind(constants, 2 * warps if small or not even or what[0] == NORMED.value else warps)


def of_shards(shard: Shard, sources: tuple[int, int], amaxes: Scales, shape: Sequence[int]) -> Scales:
    """The amaxes of both planes of x (M, K), of all shards: one each, or the bits of those of all lines.

    One collective agrees on both. Amaxes of lines that no shard cuts stay as they are.
    """
    parts: dict[int, Tensor] = {}
    for plane, (source, amax) in enumerate(zip(sources, amaxes, strict=True)):
        if amax is not None and source == TENSOR.value:
            parts[plane] = amax.max().reshape(1)
        elif amax is not None and source == LINE.value and shard.dim == 1 - plane:
            parts[plane] = amax[: shape[plane]].view(torch.float32)
    if not parts:
        return amaxes
    agreed = shard.max(torch.cat(list(parts.values()))).split([part.numel() for part in parts.values()])
    for plane, part in zip(list(parts), agreed, strict=True):
        amax = amaxes[plane]
        assert amax is not None
        parts[plane] = (part if part is agreed[0] else part.clone()).view(amax.dtype)  # kernels want aligned addresses
    return parts.get(0, amaxes[0]), parts.get(1, amaxes[1])


def plane_constants(side: str, source: int, spec: PlaneSpec | None, propagate: bool) -> Constants:
    """What the kernel is told of a plane."""
    element = tl.float8e4nv if spec is None else ELEMENTS[spec.element]
    return {side: source, f"{side}_ELEMENT": element, f"{side}_CODEC": codec_of(spec, propagate)}


def _blocks(side: str, spec: PlaneSpec | None, turned: bool) -> Constants:
    """The blocks of a plane as they lie in x."""
    rows, cols = (1, 1) if spec is None else (spec.rows or 1, spec.cols or 1)
    return {f"{side}_R": cols if turned else rows, f"{side}_C": rows if turned else cols}


def codec_of(spec: PlaneSpec | None, propagate: bool) -> int:
    """The codec of a plane's scale, as kernels know it."""
    return 0 if spec is None else CODECS[spec.codec] + (0 if propagate else HIDES.value)


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
        return OUTSIDE.value
    return {(0, 0): TENSOR, (1, 0): LINE}.get((spec.rows, spec.cols), BLOCK).value


def _limits(spec: PlaneSpec | None) -> tuple[float, float, float]:
    return (1.0, 1.0, 0.0) if spec is None else (spec.largest, spec.overflow, spec.epsilon)


def _empty(spec: PlaneSpec, x: Tensor, m: int, k: int, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes and, unless given, scales of a plane (M, K); those of a column of 1 x C blocks lie together."""
    device = x.device
    width = -(-k // 2) if is_packed(ELEMENTS[spec.element]) else k
    codes = torch.empty(m, width, dtype=torch.uint8, device=device)
    if scale is not None:
        return codes, scale
    dtype = torch.uint8 if spec.codec is ScaleCodec.E8M0 else torch.float32
    if spec.rows == 0:
        return codes, torch.empty(1, dtype=dtype, device=device)
    down, across = -(-m // spec.rows), -(-k // spec.cols) if spec.cols else 1
    if spec.rows == 1 and across > 1:
        return codes, torch.empty(across, down, dtype=dtype, device=device).t()
    return codes, torch.empty(down, across, dtype=dtype, device=device)
