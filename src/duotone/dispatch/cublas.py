"""Whether cuBLAS writes a product where it is told, and the dtypes that it gives."""

import functools

import torch
from torch import Tensor

from duotone.dispatch.casts import has_kernels
from duotone.dispatch.target import HOPPER, cuda_target

STEP = 16
"""What cuBLAS wants the contraction and the rows of the second operand to be multiples of."""


def dtype_of_product(dtype: torch.dtype, per_row: bool, rows_to_fp32: bool) -> torch.dtype:
    """The dtype in which torch gives an FP8 product whose result is `dtype`: bf16 or fp32.

    `rows_to_fp32` as of `Target.scales_rows_to_fp32`.
    """
    if dtype is torch.bfloat16 or (per_row and not rows_to_fp32):
        return torch.bfloat16
    return torch.float32


def cublas_writes(codes: Tensor, out: Tensor) -> bool:
    """Whether cuBLASLt writes a product of such codes over `out` (M, N), or adds it."""
    if not has_kernels(out) or out.device != codes.device or not _calls_cublas(out.get_device()):
        return False
    placed = out.stride() == (out.shape[1], 1) and out.data_ptr() % STEP == 0
    return placed and out.dtype in (torch.float32, torch.bfloat16) and not out.shape[1] % STEP


@functools.cache
def _calls_cublas(index: int) -> bool:
    """Checked on Hopper alone."""
    if cuda_target(index).arch != HOPPER:
        return False
    from duotone.kernels.cublas import library

    return library() is not None
