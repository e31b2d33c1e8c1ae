"""What the current CUDA device can do."""

import functools

import torch


@functools.cache
def capability() -> tuple[int, int]:
    """Of the current CUDA device; (0, 0) without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
