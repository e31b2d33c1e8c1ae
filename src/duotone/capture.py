"""Whether a CUDA graph is being captured: the one place that asks."""

import torch


def is_capturing() -> bool:
    """Whether the current stream captures a CUDA graph. torch's own question raises without a driver."""
    return torch.cuda.is_initialized() and torch._C._cuda_isCurrentStreamCapturing()
