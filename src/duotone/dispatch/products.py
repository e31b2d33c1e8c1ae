"""Products of bf16 operands that leave fp32, as an own op: `mm(out_dtype=float32)` exists on CUDA only; and products
that add to what is there."""

import torch
from torch import Tensor

from duotone.dispatch.casts import PLAIN_TYPES

_LIBRARY = torch.library.Library("duotone", "FRAGMENT")
_LIBRARY.define("mm_fp32(Tensor a, Tensor b) -> Tensor")


def _cpu(a: Tensor, b: Tensor) -> Tensor:
    # No setting of the process asks for bf16 instructions here: other threads would multiply under it too.
    return torch.mm(a.to(torch.float32), b.to(torch.float32).t())


def _cuda(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b.t(), out_dtype=torch.float32)


def _meta(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=torch.float32)


_LIBRARY.impl("mm_fp32", _cpu, "CPU")
_LIBRARY.impl("mm_fp32", _cuda, "CUDA")
_LIBRARY.impl("mm_fp32", _meta, "Meta")


def mm_fp32(a: Tensor, b: Tensor) -> Tensor:
    """bf16 or fp16 (M, K) and (N, K) -> fp32 (M, N) = a b^T, accumulated in fp32."""
    return torch.ops.duotone.mm_fp32(a, b)


def mm_into(a: Tensor, b: Tensor, out: Tensor, adds: bool) -> bool:
    """a b^T of (M, K) and (N, K), written over `out` (M, N) or, `adds`, added to it: a sum in fp32, rounded once.

    False, and nothing done, where torch has no such product.
    """
    same = out.device == a.device and type(out) in PLAIN_TYPES and out.is_contiguous()
    if not (a.is_cuda and same and out.dtype in (a.dtype, torch.float32)):
        return False
    if out.dtype is a.dtype:
        torch.addmm(out, a, b.t(), beta=int(adds), out=out)
    else:
        torch.addmm(out, a, b.t(), out.dtype, beta=int(adds), out=out)
    return True


def put(y: Tensor, out: Tensor, adds: bool) -> None:
    """A computed product, written over `out` or, `adds`, added to it."""
    if adds:
        out.add_(y)
    else:
        out.copy_(y)
