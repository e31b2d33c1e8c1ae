"""Sampling: the interface that gets the operands of a sampled step, and an even sample of the blocks of an operand."""

import math
from typing import NamedTuple

from torch import Tensor

from duotone.recipes.roles import QuantizerRole
from duotone.tensor.context import Slot
from duotone.tensor.plane import Plane, Planes

Slots = tuple[Slot | None, Slot | None]
NEIGHBOURS = 32
"""Columns that are taken together, so that memory is read in pieces."""


class Sampler:
    """A tapped recipe passes each operand to it. See `with_statistics` and `sampled_step`."""

    def take(self, role: QuantizerRole, x: Tensor, planes: Planes, slots: Slots) -> None:
        """`planes` are the encoded matrix `x` (M, K), with the delayed scales of `slots`.

        Called once for each encode, without gradients. It must not change a tensor, and must copy the values that it
        needs later: operands are freed and overwritten in the same step.
        """
        raise NotImplementedError


class Pieces(NamedTuple):
    """`count` pieces of `size` at the first multiples of `stride` of a dimension."""

    count: int
    size: int
    stride: int

    def layout(self, covered: int, step: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Sizes and strides of the pieces in a buffer whose entries, `step` apart, cover so many of the dimension."""
        return (self.count, self.size // covered), (self.stride // covered * step, step)


def spread(x: Tensor, plane: Plane, most: int) -> tuple[Tensor, Plane]:
    """About `most` elements of an operand (M, K) and the same of its plane: whole blocks, evenly over rows and columns.

    All of both if the matrix is small. `x` lies as the plane does.
    """
    rows, cols = plane.shape
    high, wide = plane.format.alignment
    wide = math.lcm(wide, NEIGHBOURS)
    down, across = rows // high, cols // wide
    if rows * cols <= most or not down or not across:
        return x, plane
    units = max(1, most // (high * wide))
    taken_across = min(across, 1 << units.bit_length() // 2)
    taken_down = max(1, min(down, units // taken_across))
    taken_across = max(1, min(across, units // taken_down))
    pieces = (
        Pieces(taken_down, high, down // taken_down * high),
        Pieces(taken_across, wide, across // taken_across * wide),
    )
    shape = taken_down * high, taken_across * wide
    parts = {
        name: _cut(plane.parts[name], pieces, spec.entries) for name, spec in plane.format.parts(*plane.shape).items()
    }
    return _cut(x, pieces, (1, 1)), Plane(plane.format, parts, shape)


def _cut(x: Tensor, pieces: tuple[Pieces, Pieces], covered: tuple[int | None, int | None]) -> Tensor:
    """The pieces of a buffer whose entries cover so many rows and columns; None covers the whole extent."""
    dims: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for dim, (pieces_along, each) in enumerate(zip(pieces, covered, strict=True)):
        if each is not None:
            dims.append(pieces_along.layout(each, x.stride(dim)))
        elif dim < x.dim():
            dims.append(((x.shape[dim],), (x.stride(dim),)))
    sizes = [size for each, _ in dims for size in each]
    strides = [stride for _, each in dims for stride in each]
    shape = [math.prod(each) for each, _ in dims]
    return x.as_strided(sizes, strides, x.storage_offset()).reshape(shape).contiguous()
