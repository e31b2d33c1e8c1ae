"""The buffers of an encoded plane, by name, and how each one shards."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Parts = dict[str, Tensor]


@dataclass(frozen=True)
class PartSpec:
    """One buffer: its shape, its dtype, and how many logical rows and columns each of its entries covers.

    `rows_per_entry` is for the first dimension and `cols_per_entry` for the second. None: the buffer describes the
    whole extent, and every shard needs the same copy. `dtype` None is the dtype of the matrix itself.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    rows_per_entry: int | None
    cols_per_entry: int | None = None

    @property
    def entries(self) -> tuple[int | None, int | None]:
        return self.rows_per_entry, self.cols_per_entry


class Shard(Protocol):
    """A matrix that is one of several shards along `dim` (0 rows, 1 columns), whose amaxes have to agree."""

    @property
    def dim(self) -> int: ...

    def max(self, amax: Tensor) -> Tensor:
        """The elementwise maximum over all shards."""
        ...


@dataclass(frozen=True)
class Factors:
    """An operand as a product: `values`, exact in bf16, times `epilogue_scale / divisor`, which follows the GEMM.

    `values` is (M, K). `epilogue_scale` is None, or fp32: one per tensor, M per row, or the grid of the format's block.
    """

    values: Tensor
    epilogue_scale: Tensor | None
    divisor: float
