"""A copy with contiguous rows, for transposed codes. Torch's own copy reads their columns one byte at a time."""

import torch
import triton.language as tl
from torch import Tensor

from duotone.kernels.launch import kernel

TILE = 64


@kernel
def rows_kernel(x, out, DOWN, ACROSS, M, K, T: tl.constexpr):
    """The bytes of a matrix (M, K) whose elements lie DOWN and ACROSS apart."""
    across = tl.cdiv(K, T)
    pm, pk = tl.program_id(0) // across, tl.program_id(0) % across
    i, j = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    inside = (pm * T + i < M) & (pk * T + j < K)
    start, to = (pm * T).to(tl.int64) * DOWN + (pk * T).to(tl.int64) * ACROSS, (pm * T).to(tl.int64) * K + pk * T
    tl.store(out + to + (i * K + j), tl.load(x + start + (i * DOWN + j * ACROSS), mask=inside), mask=inside)


_ROWS = rows_kernel.bind({"T": TILE})


def contiguous_rows(codes: Tensor) -> Tensor:
    """uint8 (M, K), with any strides."""
    m, k = codes.shape
    out = torch.empty((m, k), dtype=torch.uint8, device=codes.device)
    _ROWS(-(-m // TILE) * -(-k // TILE), (codes, out), (*codes.stride(), m, k))
    return out
