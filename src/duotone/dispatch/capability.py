"""What the current CUDA device can do."""

import functools

import torch

HOPPER = (9, 0)


@functools.cache
def capability() -> tuple[int, int]:
    """Of the current NVIDIA device; (0, 0) without one, also on other makes that torch calls CUDA."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.get_device_capability()
