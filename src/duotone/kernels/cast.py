"""The cast of a contiguous matrix (M, K) to one plane or to both, in one read.

The scale of a plane comes from outside (delayed), from amaxes that an earlier kernel took (per tensor, per row), or
from the tile itself (blocks).
"""

from functools import cache, lru_cache
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from duotone.allocate import Allocate, allocator
from duotone.formats import ScaleCodec
from duotone.kernels.activations import GATED_SLOPE, NO_NORM, NORMED, NOTHING, FusedProducer, materialize
from duotone.kernels.amax import PARTIALS, line_amax, tensor_amax
from duotone.kernels.elements import E2M1, ELEMENTS
from duotone.kernels.launch import Constants, Launch
from duotone.kernels.scaling import CODECS, HIDES
from duotone.kernels.tile_scales import ABSENT, BLOCK, LINE, OUTSIDE, SHARED, TENSOR
from duotone.kernels.tiles import cast_kernel


class PlaneSpec(NamedTuple):
    """What the kernel has to know of a plane's format. Blocks are (rows, cols) of the plane; 0 is the whole extent."""

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


class Buffers(NamedTuple):
    """Sizes and strides of the codes and of the scales of a plane, and the dtype of the scales."""

    codes: tuple[int, int]
    codes_stride: tuple[int, int]
    scale: tuple[int, ...]
    scale_stride: tuple[int, ...]
    dtype: torch.dtype

    def parts(self, empty: Allocate, scale: Tensor | None = None) -> dict[str, Tensor]:
        """Uninitialised parts. `scale`: that of another plane, if both share it."""
        codes = empty(self.codes, self.codes_stride, torch.uint8)
        return {"codes": codes, "scale": empty(*self[2:]) if scale is None else scale}


LINEAR, NARROW, BLOCKED = (64, 128, 4), (32, 128, 1), (128, 128, 4)
"""Tiles and warps for one scale or one per line, for blocks of at most 32 in both directions, and for wider blocks."""

ACTIVATED = {LINEAR: (64, 64, 4), NARROW: (32, 128, 2), BLOCKED: (128, 128, 4)}
"""The tiles of activations and their gradients, which take registers."""

GATED = {LINEAR: (64, 64, 4), NARROW: (32, 128, 4), BLOCKED: (128, 128, 8)}
"""The tiles of gated gradients. A program has two."""


SHAPES = 1024
"""How many shapes a cast remembers."""

MaybeParts = dict[str, Tensor] | None
Scales = tuple[Tensor | None, Tensor | None]
NOT_KNOWN: Scales = (None, None)


class Cast:
    """The cast to a rowwise plane, a columnwise plane, or both. `shared`: the second is the first one, transposed.

    With `propagate`, infinities become NaN codes under a scale from outside, and NaN scales otherwise. Without it they
    saturate.
    """

    def __init__(self, row: PlaneSpec | None, col: PlaneSpec | None, shared: bool, propagate: bool = True) -> None:
        self.row, self.col, self.shared, self.propagate = row, col, shared, propagate
        self.sources = _source(row), SHARED.value if shared else _source(col)
        self.needs_amax, self.needs_lines = TENSOR.value in self.sources, LINE.value in self.sources
        self.shares_scale = shared and self.sources[0] != BLOCK.value
        self.is_random = False
        self.marks = propagate and OUTSIDE.value in self.sources
        self.tile = _tile(self.sources, row, col)
        self.floats = *_limits(row), *_limits(col)
        self._bound, self._prepared = cache(self._bind), lru_cache(maxsize=SHAPES)(self._prepare)

    def __call__(
        self,
        x: Tensor,
        scales: Scales = (None, None),
        live: Tensor | None = None,
        amaxes: Scales = NOT_KNOWN,
        *,
        typed: bool = False,
    ) -> tuple[MaybeParts, MaybeParts]:
        """The parts of both planes of contiguous (M, K). `scales` are those of delayed planes, fp32 (1,).

        - `live`: the bits of an fp32 amax as int32 (1,). It rises to the amax of x.
        - `amaxes`: those that are known, for each plane: partial ones of x, or those of its lines, fp32.
        - `typed`: codes have the dtype of the element, if torch has it, instead of uint8.
        """
        scales, count = self._amaxes(x, scales, amaxes)
        return self._enqueue((x, None, *NO_NORM), x.shape, (NOTHING.value, 0), (*scales, live), count, typed)

    def measure(self, x: Tensor, dim: int) -> tuple[Scales, list[bool]]:
        """The amaxes of contiguous x (M, K) for each plane, fp32, and whether shards along `dim` have to agree."""
        return measured(x, self.sources, self._amaxes(x, NOT_KNOWN, NOT_KNOWN)[0], dim)

    def _amaxes(self, x: Tensor, scales: Scales, amaxes: Scales) -> tuple[Scales, int]:
        """`scales` with the amaxes of planes, which may be known, and the number of partial ones."""
        count = 0
        if self.needs_amax:
            amax = amaxes[self.sources[0] != TENSOR.value]  # both planes have the same one
            amax = tensor_amax(x) if amax is None else amax
            scales, count = self._with(scales, TENSOR.value, amax, amax), amax.numel()
        if self.needs_lines:
            scales = self._with(scales, LINE.value, *lines(x, self.sources, amaxes))
        return scales, count

    def over(
        self,
        x: Tensor,
        planes: tuple[MaybeParts, MaybeParts],
        noop: Tensor,
        scales: Scales = (None, None),
        live: Tensor | None = None,
    ) -> bool:
        """Like a call, but over the parts of planes. If `noop`, int32 (1,) on the device, is not 0, nothing is written
        or recorded. The matrix is still read if a scale follows from its amax.

        Returns False, and changes nothing, if the parts do not lie as the cast writes them.
        """
        m, k = x.shape
        launch, programs, *buffers = self._prepared(m, k, live is not None, (NOTHING.value, 0), True)
        row, col = planes
        if not all(map(_lie_as, planes, buffers)) or (
            self.shares_scale and row and col and row["scale"].data_ptr() != col["scale"].data_ptr()
        ):
            return False
        scales, count = self._amaxes(x, scales, NOT_KNOWN)
        parts = [part if part is None or part.itemsize > 1 else part.view(torch.uint8) for part in _flat(planes)]
        launch(programs, (x, None, *NO_NORM, *parts, *scales, live, noop), (m, k, count), self.floats)
        return True

    def produced(
        self,
        producer: FusedProducer,
        scales: Scales = (None, None),
        live: Tensor | None = None,
        *,
        typed: bool = False,
    ) -> tuple[MaybeParts, MaybeParts]:
        """Cast a matrix that the kernel also computes. If the cast needs its amax first, the matrix is computed and
        stored before. The amax of a norm follows from its statistics instead."""
        if self.needs_lines or not self._fits(producer):
            return self(materialize(producer), scales, live, typed=typed)
        amax = None
        if self.needs_amax and producer.norm is None:
            amax = torch.zeros(1, dtype=torch.int32, device=producer.x.device)
            of_matrix = amax.view(torch.float32)
            return self(materialize(producer, amax), scales, live, (of_matrix, of_matrix), typed=typed)
        if self.needs_amax:
            amax = producer.norm.measure_amax()
        elif producer.norm is not None:
            producer.norm.measure()
        scales, count = self._with(scales, TENSOR.value, amax, amax), 0 if amax is None else amax.numel()
        what = producer.what, producer.act
        return self._enqueue(producer.tensors, producer.shape, what, (*scales, live), count, typed)

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
        typed: bool,
    ) -> tuple[MaybeParts, MaybeParts]:
        m, k = shape
        launch, programs, of_row, of_col = self._prepared(m, k, sources[2] is not None, what)
        assert inputs[0] is not None
        empty = allocator(inputs[0])
        row = None if of_row is None else of_row.parts(empty)
        col = None if of_col is None else of_col.parts(empty, row["scale"] if row and self.shares_scale else None)
        launch(programs, (*inputs, *_flat((row, col)), *sources, None), (m, k, count), self.floats)
        return (_typed(row, self.row), _typed(col, self.col)) if typed else (row, col)

    def _prepare(
        self, m: int, k: int, record: bool, what: tuple[int, int], flagged: bool = False
    ) -> tuple[Launch, int, Buffers | None, Buffers | None]:
        """The launch for a matrix of this shape, its number of programs, and the buffers of both planes."""
        tm, tk, _ = tile = self._tile_for(what[0])
        launch = self._bound(not (m % tm or k % tk), record, what, tile, flagged)
        wide = k // 2 if what[0] == GATED_SLOPE.value else k
        return launch, -(-m // tm) * -(-wide // tk), _buffers(self.row, m, k), _buffers(self.col, k, m)

    def _tile_for(self, what: int) -> tuple[int, int, int]:
        if what in (NOTHING.value, NORMED.value):
            return self.tile
        return (GATED if what == GATED_SLOPE.value else ACTIVATED)[self.tile]

    def _bind(
        self, even: bool, record: bool, what: tuple[int, int], tile: tuple[int, int, int], flagged: bool
    ) -> Launch:
        """`flagged` launches have a tensor that others do not have."""
        tm, tk, warps = tile
        constants = {
            **plane_constants("ROW", self.sources[0], self.row, self.propagate),
            **plane_constants("COL", self.sources[1], self.col, self.propagate),
            **block_constants("ROW", self.row, turned=False),
            **block_constants("COL", self.col, turned=True),
            **{"MARKS": self.marks},
            **{"WHAT": what[0], "ACT": what[1], "RECORD": record, "TM": tm, "TK": tk, "EVEN": even, "N": PARTIALS},
        }
        # Masks, the statistics of norms, and elements that the hardware does not convert to take registers.
        small = any(isinstance(spec.element, str) for spec in (self.row, self.col) if spec is not None)
        return cast_kernel.bind(constants, 2 * warps if small or not even or what[0] == NORMED.value else warps)


def _flat(planes: tuple[MaybeParts, MaybeParts]) -> list[Tensor | None]:
    """The codes and scales of both planes."""
    return [part for plane in planes for part in (plane.values() if plane else (None, None))]


def _lie_as(parts: MaybeParts, buffers: Buffers | None) -> bool:
    if parts is None or buffers is None:
        return parts is buffers
    codes, scale = parts["codes"], parts["scale"]
    return (codes.shape, codes.stride(), scale.shape, scale.stride()) == buffers[:4]


def lines(x: Tensor, sources: tuple[int, int], amaxes: Scales, nan: bool = False) -> Scales:
    """The bits of the amaxes of rows and columns. They are measured unless those that planes need are known."""
    row, col = (None if amax is None else amax.view(torch.int32) for amax in amaxes)
    if any(amax is None and source == LINE.value for amax, source in zip(amaxes, sources, strict=True)):
        rows, cols = line_amax(x, nan)
        return rows if row is None else row, cols if col is None else col
    return row, col


def measured(
    x: Tensor, sources: tuple[int, int], amaxes: tuple[Tensor | None, ...], dim: int
) -> tuple[Scales, list[bool]]:
    """The amaxes of planes of x (M, K), fp32, from partial ones or bits, and whether each covers `dim` of x."""
    row, col = (
        None
        if amax is None
        else amax[:size].view(torch.float32)
        if source == LINE.value
        else amax.amax(0, keepdim=True)
        for amax, size, source in zip(amaxes, x.shape, sources, strict=True)
    )
    return (row, col), [one == TENSOR.value or (one == LINE.value and at == 1 - dim) for at, one in enumerate(sources)]


def plane_constants(side: str, source: int, spec: PlaneSpec | None, propagate: bool) -> Constants:
    """The constants of the kernel for a plane."""
    element = tl.float8e4nv if spec is None else ELEMENTS[spec.element]
    return {side: source, f"{side}_ELEMENT": element, f"{side}_CODEC": codec_of(spec, propagate)}


def block_constants(side: str, spec: PlaneSpec | None, turned: bool) -> Constants:
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


def _buffers(spec: PlaneSpec | None, m: int, k: int) -> Buffers | None:
    """The buffers of a plane (M, K). Scales of a column of 1 x C blocks lie together."""
    if spec is None:
        return None
    width = -(-k // 2) if ELEMENTS[spec.element] == E2M1.value else k
    dtype = torch.uint8 if spec.codec is ScaleCodec.E8M0 else torch.float32
    if spec.rows == 0:
        return Buffers((m, width), (width, 1), (1,), (1,), dtype)
    down, across = -(-m // spec.rows), -(-k // spec.cols) if spec.cols else 1
    stride = (1, down) if spec.rows == 1 and across > 1 else (across, 1)
    return Buffers((m, width), (width, 1), (down, across), stride, dtype)


def _typed(parts: MaybeParts, spec: PlaneSpec | None) -> MaybeParts:
    if parts is None or spec is None or isinstance(spec.element, str):
        return parts
    return {**parts, "codes": parts["codes"].view(spec.element)}
