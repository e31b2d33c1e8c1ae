"""Sampling: who gets the operands of a sampled step, and an even sample of the blocks of an operand."""

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
    """What a tapped recipe gives each operand to. See `with_statistics` and `sampled_step`."""

    def take(self, role: QuantizerRole, x: Tensor, planes: Planes, slots: Slots) -> None:
        """`planes` are what the matrix `x` (M, K) was encoded to, with the delayed scales of `slots`.

        Called once for each encode, without gradients. It must not change a tensor, and copies what it keeps: operands
        are freed and overwritten later in the step.
        """
        raise NotImplementedError


class Pieces(NamedTuple):
    """Pieces of `size` at each multiple of `stride` in the first `extent` of a dimension."""

    size: int
    stride: int
    extent: int

    def of(self, x: Tensor, dim: int, covered: int) -> Tensor:
        """The pieces as a view with one more dimension, the last; an entry of `x` covers so many of the dimension."""
        return x.narrow(dim, 0, self.extent // covered).unfold(dim, self.size // covered, self.stride // covered)


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
    taken_across = max(1, min(across, round(math.sqrt(units))))
    taken_down = max(1, min(down, units // taken_across))
    taken_across = max(1, min(across, units // taken_down))
    pieces = (
        Pieces(high, down // taken_down * high, down * high),
        Pieces(wide, across // taken_across * wide, across * wide),
    )
    shape = (len(range(0, down, down // taken_down)) * high, len(range(0, across, across // taken_across)) * wide)
    parts = {
        name: _cut(plane.parts[name], pieces, spec.entries) for name, spec in plane.format.parts(*plane.shape).items()
    }
    return _cut(x, pieces, (1, 1)), Plane(plane.format, parts, shape)


def _cut(x: Tensor, pieces: tuple[Pieces, Pieces], covered: tuple[int | None, int | None]) -> Tensor:
    """The pieces of a buffer whose entries cover so many rows and columns; None covers the whole extent."""
    by_row, by_column = covered
    if by_row is not None:
        x = pieces[0].of(x, 0, by_row).movedim(-1, 1).flatten(0, 1)
    if by_column is not None:
        x = pieces[1].of(x, 1, by_column).flatten(1, 2)
    return x.contiguous()
