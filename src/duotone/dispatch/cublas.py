"""What the cuBLAS that torch calls multiplies on a device, and whether it writes where it is told."""

import functools

import torch
from torch import Tensor

from duotone.dispatch.capability import HOPPER, capability, cublas_is_old
from duotone.dispatch.casts import has_kernels

STEP = 16
"""What cuBLAS wants the contraction and the rows of the second operand to be multiples of."""


def calls_hopper() -> bool:
    """Whether products are those of cuBLAS for compute capability 9 that take scales per row and per block."""
    return capability()[0] == 9 and not cublas_is_old()


# What torch.compiler.assume_constant_result sets; calling it would import the compiler with the library.
calls_hopper._dynamo_marked_constant = True  # type: ignore[attr-defined]


def dtype_of_product(dtype: torch.dtype, per_row: bool) -> torch.dtype:
    """The dtype in which torch gives an FP8 product whose result is `dtype`: bf16 or fp32. With scales per row other
    devices than Hopper have bf16 alone."""
    if dtype is torch.bfloat16 or (per_row and not calls_hopper()):
        return torch.bfloat16
    return torch.float32


def cublas_writes(codes: Tensor, out: Tensor) -> bool:
    """Whether cuBLASLt writes a product of such codes over `out` (M, N), or adds it."""
    if not has_kernels(out) or out.device != codes.device or not _calls_cublas():
        return False
    placed = out.stride() == (out.shape[1], 1) and out.data_ptr() % STEP == 0
    return placed and out.dtype in (torch.float32, torch.bfloat16) and not out.shape[1] % STEP


@functools.cache
def _calls_cublas() -> bool:
    """Checked on Hopper alone."""
    if capability() != HOPPER:
        return False
    from duotone.kernels.cublas import library

    return library() is not None
