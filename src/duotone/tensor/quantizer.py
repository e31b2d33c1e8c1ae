"""A quantizer: a frozen pair of formats, one for each direction in which a GEMM reads the tensor."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from duotone.errors import UserError
from duotone.formats import IDENTITY, Format
from duotone.tensor.history import History
from duotone.tensor.plane import Plane

SOURCES = ("original", "rowwise_dequantized")


class Usage(NamedTuple):
    """Which planes are wanted."""

    rowwise: bool = True
    columnwise: bool = True


BOTH = Usage()


class Planes(NamedTuple):
    """What a quantizer made: the plane of x and the plane of x transposed, None where not wanted."""

    rowwise: Plane | None
    columnwise: Plane | None


@dataclass(frozen=True)
class Quantizer:
    """`rowwise` encodes x, `columnwise` its transpose; None means that the direction is never made.

    `columnwise_source` is what the columnwise plane encodes: the original, or the dequantized rowwise plane, so that
    backward differentiates the function that forward computed. `history` holds the parameters of those directions
    whose format is delayed.
    """

    rowwise: Format | None = IDENTITY
    columnwise: Format | None = IDENTITY
    columnwise_source: str = "original"
    history: History | None = None

    def __post_init__(self) -> None:
        for fmt in (self.rowwise, self.columnwise):
            if fmt is not None and not hasattr(fmt, "outer_extent"):
                raise UserError(f"a quantizer takes formats; got {fmt!r}: use duotone.formats.get(name)")
        if self.columnwise_source not in SOURCES:
            raise UserError(
                f"columnwise_source {self.columnwise_source!r} is unknown; allowed are {', '.join(SOURCES)}"
            )

    @property
    def is_stochastic(self) -> bool:
        return any(f is not None and f.is_stochastic for f in (self.rowwise, self.columnwise))

    def with_usage(self, rowwise: bool = True, columnwise: bool = True) -> "Quantizer":
        """The quantizer that makes only these planes."""
        return replace(
            self,
            rowwise=self.rowwise if rowwise else None,
            columnwise=self.columnwise if columnwise else None,
        )

    def encode(self, x: Tensor, usage: Usage = BOTH, seed: Tensor | None = None) -> Planes:
        """Planes of a 2-D tensor; only those that `usage` names are kept.

        The columnwise plane is derived from the rowwise one where that is lossless and both share a format.
        """
        wants_row = usage.rowwise and self.rowwise is not None
        wants_col = usage.columnwise and self.columnwise is not None
        follows = wants_col and self.columnwise_source != "original" and self.rowwise is not None
        row = None
        if wants_row or follows:
            assert self.rowwise is not None
            row = Plane.encode(self.rowwise, x, seed=seed)
        col = None
        if wants_col:
            source = row.dequantize(x.dtype) if follows and row is not None else x
            col = self._columnwise(source, None if follows else row, seed)
        return Planes(row if wants_row else None, col)

    def _columnwise(self, x: Tensor, row: Plane | None, seed: Tensor | None) -> Plane:
        assert self.columnwise is not None
        if self.columnwise.is_derivable:
            if row is None or row.format != self.columnwise:
                row = Plane.encode(self.columnwise, x, seed=seed)
            col = row.transposed()
            assert col is not None
            return col
        return Plane.encode(self.columnwise, x.t(), seed=seed, plane="col")
