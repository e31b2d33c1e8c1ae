"""The 16-point random Hadamard transform of NVFP4's weight-gradient operands.

y = u R with R = diag(sign) H16 / 4, H16 the Sylvester matrix, along the contraction; R R^T = I, so a product of two
rotated operands is the product of the plain ones. The sign vector is fixed: bit i of 0xD7E8 set means minus.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

SIZE = 16
SIGN_MASK = 0xD7E8
NAME = f"hadamard{SIZE}:{SIGN_MASK:04x}"


def rotation(device: torch.device | None = None) -> Tensor:
    """R as fp32 (16, 16), every entry +-0.25. It is computed on the device: a copy from the host would wait for it."""
    i = torch.arange(SIZE, device=device)
    odd = i[:, None] & i
    odd = odd ^ (odd >> 2)
    minus = (odd ^ (odd >> 1) ^ (SIGN_MASK >> i)[:, None]) & 1
    return minus.to(torch.float32) * -0.5 + 0.25


def rotate(x: Tensor) -> Tensor:
    """(M, K) -> bf16 (M, K padded to 16): fp32 sums of 16 products in order, one rounding to bf16."""
    x = x.to(torch.bfloat16)
    if x.shape[1] % SIZE:
        x = F.pad(x, (0, -x.shape[1] % SIZE))
    return _apply(x, rotation(x.device)).to(torch.bfloat16)


def unrotate(y: Tensor) -> Tensor:
    """The inverse: fp32 (M, K) -> fp32 (M, K)."""
    return _apply(y, rotation(y.device).t())


def _apply(x: Tensor, matrix: Tensor) -> Tensor:
    groups = x.reshape(x.shape[0], x.shape[1] // SIZE, SIZE).to(torch.float32)
    total = groups[..., 0:1] * matrix[0]
    for i in range(1, SIZE):  # the order of the sum is part of the meaning
        total = total + groups[..., i : i + 1] * matrix[i]
    return total.flatten(1)
