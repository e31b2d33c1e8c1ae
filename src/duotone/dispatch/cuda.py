"""Stages on CUDA: Triton kernels behind own ops, so that fake tensors and compilers see shapes and not kernels.

Elements without a torch float8 dtype, and blocks that are no view of a matrix, take the plain stages.
"""

import torch
from torch import Tensor

from duotone.dispatch.target import runs_kernels
from duotone.formats.elements import Element
from duotone.formats.stages import Stages

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LIBRARY = torch.library.Library("duotone", "FRAGMENT")
_LIBRARY.define("block_amax(Tensor x, int rows, int cols, float nan) -> Tensor")
_CAST = "Tensor x, Tensor multiplier, int rows, int cols, float largest, ScalarType dtype, bool marks"
_LIBRARY.define(f"block_cast({_CAST}) -> Tensor")
_LIBRARY.define(
    "fp32_scale(Tensor amax, float largest, float overflow, float epsilon, bool to_power) -> (Tensor, Tensor)"
)
_LIBRARY.define("exponent_scale(Tensor amax, float reciprocal) -> (Tensor, Tensor)")
_LIBRARY.define("contiguous_rows(Tensor codes) -> Tensor")
_LIBRARY.define("block_values(Tensor codes, Tensor factor, int rows, int cols, ScalarType dtype) -> Tensor")


def _amax(x: Tensor, rows: int, cols: int, nan: float) -> Tensor:
    from duotone.kernels import blocks

    with torch.cuda.device(x.device):
        return blocks.block_amax(x, rows, cols, nan)


def _cast(
    x: Tensor, multiplier: Tensor, rows: int, cols: int, largest: float, dtype: torch.dtype, marks: bool
) -> Tensor:
    from duotone.kernels import blocks

    with torch.cuda.device(x.device):
        return blocks.block_cast(x, multiplier, rows, cols, largest, dtype, marks)


def _values(codes: Tensor, factor: Tensor, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    from duotone.kernels import blocks

    with torch.cuda.device(codes.device):
        return blocks.block_values(codes, factor, rows, cols, dtype)


def _fake_amax(x: Tensor, rows: int, cols: int, nan: float) -> Tensor:
    m, k = x.shape
    return x.new_empty((-(-m // rows) if rows else 1, -(-k // cols) if cols else 1), dtype=torch.float32)


def _fake_cast(
    x: Tensor, multiplier: Tensor, rows: int, cols: int, largest: float, dtype: torch.dtype, marks: bool
) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _fake_values(codes: Tensor, factor: Tensor, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)


def _rows(codes: Tensor) -> Tensor:
    from duotone.kernels import blocks

    with torch.cuda.device(codes.device):
        return blocks.contiguous_rows(codes)


def _fp32_scale(amax: Tensor, largest: float, overflow: float, epsilon: float, to_power: bool) -> tuple[Tensor, Tensor]:
    from duotone.kernels import blocks

    with torch.cuda.device(amax.device):
        return blocks.fp32_scale(amax.contiguous(), largest, overflow, epsilon, to_power)


def _fake_fp32_scale(amax: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(amax), torch.empty_like(amax)


def _exponent_scale(amax: Tensor, reciprocal: float) -> tuple[Tensor, Tensor]:
    from duotone.kernels import blocks

    with torch.cuda.device(amax.device):
        return blocks.exponent_scale(amax.contiguous(), reciprocal)


def _fake_exponent_scale(amax: Tensor, reciprocal: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(amax, dtype=torch.uint8), torch.empty_like(amax)


def _fake_rows(codes: Tensor) -> Tensor:
    return codes.new_empty(codes.shape)


for _name, _kernel, _fake in (
    ("block_amax", _amax, _fake_amax),
    ("block_cast", _cast, _fake_cast),
    ("block_values", _values, _fake_values),
    ("contiguous_rows", _rows, _fake_rows),
    ("fp32_scale", _fp32_scale, _fake_fp32_scale),
    ("exponent_scale", _exponent_scale, _fake_exponent_scale),
):
    _LIBRARY.impl(_name, _kernel, "CUDA")
    _LIBRARY.impl(_name, _fake, "Meta")


def contiguous_rows(codes: Tensor) -> Tensor:
    """Codes (M, K), uint8, whose rows are contiguous: themselves, or a copy."""
    if (
        torch.compiler.is_compiling()
        or codes.is_contiguous()
        or not runs_kernels(codes.get_device())
        or codes.numel() == 0
    ):
        return codes.contiguous()
    return torch.ops.duotone.contiguous_rows(codes)


def matrix(blocks: Tensor) -> Tensor | None:
    """The strided (M, K) matrix that `blocks` is a view of, or None where its blocks lie elsewhere."""
    down, rows, across, cols = blocks.shape
    s0, s1, s2, s3 = blocks.stride()
    if (down > 1 and rows > 1 and s0 != rows * s1) or (across > 1 and cols > 1 and s2 != cols * s3):
        return None
    strides = (s1 if rows > 1 else s0, s3 if cols > 1 else s2)
    return blocks.as_strided((down * rows, across * cols), strides)


class CudaStages(Stages):
    """Amax, cast and values by Triton kernels."""

    name = "Triton"

    def amax(self, blocks: Tensor, nan: float = 0.0) -> Tensor:
        x = self._matrix(blocks)
        rows, cols = self._extents(blocks)
        if x is None or (cols == 0 and rows > 1) or (rows == 0 and cols > 0):
            return super().amax(blocks, nan)
        return torch.ops.duotone.block_amax(x, rows, cols, nan)

    def cast(self, blocks: Tensor, multiplier: Tensor, element: Element, marks: bool = False) -> Tensor:
        x = self._matrix(blocks)
        if x is None or element.dtype is None:
            return super().cast(blocks, multiplier, element, marks)
        grid = multiplier.reshape(multiplier.shape[0], multiplier.shape[2]).contiguous()
        extents = self._extents_of(grid, blocks)
        codes = torch.ops.duotone.block_cast(x, grid, *extents, element.max, element.dtype, marks)
        return codes.view(blocks.shape)

    def values(self, codes: Tensor, factor: Tensor, element: Element, dtype: torch.dtype) -> Tensor:
        x = self._matrix(codes)
        if x is None or element.dtype is None or factor.shape[1] != 1 or factor.shape[3] != 1:
            return super().values(codes, factor, element, dtype)
        grid = factor.reshape(factor.shape[0], factor.shape[2]).contiguous()
        extents = self._extents_of(grid, codes)
        return torch.ops.duotone.block_values(x, grid, *extents, dtype).view(codes.shape)

    def fp32_scale(
        self, amax: Tensor, largest: float, overflow: float, epsilon: float, to_power: bool
    ) -> tuple[Tensor, Tensor]:
        if amax.numel() == 0:
            return super().fp32_scale(amax, largest, overflow, epsilon, to_power)
        return torch.ops.duotone.fp32_scale(amax, largest, overflow, epsilon, to_power)

    def exponent_scale(self, amax: Tensor, reciprocal: float) -> tuple[Tensor, Tensor]:
        if amax.numel() == 0:
            return super().exponent_scale(amax, reciprocal)
        return torch.ops.duotone.exponent_scale(amax, reciprocal)

    def _matrix(self, blocks: Tensor) -> Tensor | None:
        small = blocks.numel() == 0 or not all(n & (n - 1) == 0 for n in self._extents(blocks))
        known = blocks.dtype in DTYPES or (blocks.dtype.is_floating_point and blocks.dtype.itemsize == 1)
        return None if small or not known else matrix(blocks)

    def _extents(self, blocks: Tensor) -> tuple[int, int]:
        """Rows and columns of a block, 0 where one block spans the matrix."""
        down, rows, across, cols = blocks.shape
        return (0 if down == 1 and rows > 128 else rows), (0 if across == 1 and cols > 128 else cols)

    def _extents_of(self, grid: Tensor, blocks: Tensor) -> tuple[int, int]:
        _, rows, _, cols = blocks.shape
        return (0 if grid.shape[0] == 1 else rows), (0 if grid.shape[1] == 1 else cols)


CUDA = CudaStages()
