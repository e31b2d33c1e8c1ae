"""Products of bf16 operands that leave fp32, as an own op: `mm(out_dtype=float32)` exists on CUDA only."""

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("duotone", "FRAGMENT")
_LIBRARY.define("mm_fp32(Tensor a, Tensor b) -> Tensor")


def _cpu(a: Tensor, b: Tensor) -> Tensor:
    # fp32 operands that hold bf16 values: the backend may use bf16 instructions, whose products are exact.
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        return torch.mm(a.to(torch.float32), b.to(torch.float32).t())
    finally:
        matmul.fp32_precision = before


def _cuda(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b.t(), out_dtype=torch.float32)


def _meta(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=torch.float32)


_LIBRARY.impl("mm_fp32", _cpu, "CPU")
_LIBRARY.impl("mm_fp32", _cuda, "CUDA")
_LIBRARY.impl("mm_fp32", _meta, "Meta")


def mm_fp32(a: Tensor, b: Tensor) -> Tensor:
    """bf16 (M, K) and (N, K) -> fp32 (M, N) = a b^T, accumulated in fp32."""
    return torch.ops.duotone.mm_fp32(a, b)
