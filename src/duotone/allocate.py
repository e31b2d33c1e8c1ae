"""Uninitialised tensors at the least cost to the host. Needs no Triton."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
"""An uninitialised tensor of a size, strides and a dtype."""


def allocator(x: Tensor) -> Allocate:
    """Allocates on the device of `x`. For the current CUDA device it does what compiled code does, in half the time."""
    if x.is_cuda and x.get_device() == torch._C._cuda_getDevice():
        return empty_cuda
    return partial(_empty_on, x.device)


empty_cuda: Allocate = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
"""Allocates on the current CUDA device."""


def _empty_on(device: torch.device, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)
