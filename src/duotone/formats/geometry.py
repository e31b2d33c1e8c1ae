"""Block geometry and the buffers of an encoded plane: which elements share a scale, and how each buffer shards."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from duotone.graph_ops import cast_after


class Block(NamedTuple):
    """`rows` x `cols` elements share a scale; 0 stands for the whole extent.

    (0, 0) is per tensor, (1, 0) per row, (1, 32) a block along the contraction, (16, 16) a square.
    """

    rows: int
    cols: int

    @property
    def name(self) -> str:
        """ "tensor", "row", or as "1x32"."""
        return {(0, 0): "tensor", (1, 0): "row"}.get(self, f"{self.rows}x{self.cols}")

    @property
    def transposes(self) -> bool:
        """Whether the blocks of the transpose are the transposed blocks."""
        return self.rows == self.cols

    def grid(self, rows: int, cols: int) -> tuple[int, int]:
        """Number of blocks in each direction of a rows x cols matrix; a ragged last block counts."""
        return -(-rows // self.rows) if self.rows else 1, -(-cols // self.cols) if self.cols else 1

    def view(self, x: Tensor) -> Tensor:
        """(M, K) -> (grid rows, rows, grid cols, cols); missing elements of ragged blocks are 0."""
        (m, k), rows, cols = x.shape, self.rows, self.cols
        down, rows = (-(-m // rows), rows) if rows else (1, m)
        across, cols = (-(-k // cols), cols) if cols else (1, k)
        if down * rows != m or across * cols != k:
            x = F.pad(x, (0, across * cols - k, 0, down * rows - m))
        return x.view(down, rows, across, cols)

    def unview(self, blocks: Tensor, rows: int, cols: int) -> Tensor:
        """(grid rows, rows, grid cols, cols) -> (M, K), the inverse of `view`."""
        down, height, across, width = blocks.shape
        x = blocks.reshape(down * height, across * width)
        return x if down * height == rows and across * width == cols else crop(x, rows, cols)


TENSOR = Block(0, 0)
ROW = Block(1, 0)


def crop(x: Tensor, rows: int, cols: int) -> Tensor:
    """The first rows and columns of a matrix, as a view. Everything that cuts padding off calls this.

    Code compiled for a CPU calls an op that copies it, and so do programs, which may be compiled later.
    torch's C++ backend splits a loop by the width of the blocks that share a scale. It drops the remainder if the loop
    ends inside of a block (`try_loop_split`).
    """
    tracing = torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()
    if x.is_cpu and (tracing or isinstance(x, FunctionalTensor)) and (rows, cols) != x.shape:
        return cast_after(x, x)[:rows, :cols]
    return x[:rows, :cols]


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
        """Logical rows and columns of an entry."""
        return self.rows_per_entry, self.cols_per_entry


@dataclass(frozen=True)
class Factors:
    """An operand as a product: `values`, exact in bf16, times `epilogue_scale / divisor`, which follows the GEMM.

    `values` is (M, K). `epilogue_scale` is None, or fp32: one per tensor, M per row, or the grid of the format's block.
    """

    values: Tensor
    epilogue_scale: Tensor | None
    divisor: float
