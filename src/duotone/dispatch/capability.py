"""What the current CUDA device can do."""

import functools

import torch

HOPPER = (9, 0)
BLOCKS_SINCE = (12, 9)
"""The first CUDA whose cuBLAS multiplies FP8 with scales per row, to fp32 too, and per block on Hopper."""


@functools.cache
def capability() -> tuple[int, int]:
    """Of the NVIDIA device that is current when this is first asked; (0, 0) without one, also on other makes that torch
    calls CUDA."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.get_device_capability()


@functools.cache
def cublas_is_old() -> bool:
    """Whether torch was built with a cuBLAS from before `BLOCKS_SINCE`."""
    built = torch.version.cuda
    return built is not None and tuple(int(n) for n in built.split(".")[:2]) < BLOCKS_SINCE
