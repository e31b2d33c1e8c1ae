"""Scaled products: FP8 codes multiplied by cuBLAS as they are, with a scale per tensor or per row of each operand."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.dispatch.cuda import contiguous_rows

STEP = 16
"""What cuBLAS wants the contraction and the rows of the second operand to be multiples of."""
SCALED = {"tensor", "row"}


@functools.cache
def capability() -> tuple[int, int]:
    """Of the current CUDA device; (0, 0) without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


class ScaledProduct:
    """torch._scaled_mm, accumulated in full fp32 (its fast accumulation truncates, so same-sign sums shrink)."""

    name = "cuBLAS FP8 product"
    native = True
    note = ""

    def reject(self, problem: Any) -> str:
        if problem.device != "cuda":
            return "it runs on CUDA"
        if capability() < (8, 9):
            return f"it needs compute capability 8.9, and this device has {'.'.join(map(str, capability()))}"
        if not problem.extents <= SCALED or problem.a.transform or problem.b.transform:
            return "it takes one fp32 scale per tensor or per row"
        dtypes = (problem.a.code_dtype, problem.b.code_dtype)
        if None in dtypes or dtypes == (torch.float8_e5m2, torch.float8_e5m2):
            return "it takes E4M3 with E4M3 or E5M2"
        return ""

    def run(self, a: Any, b: Any, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        rows, cols = a.shape[0], b.shape[0]
        if 0 in (rows, cols, a.shape[1]):
            y = torch.zeros((rows, cols), dtype=torch.float32, device=a.parts["codes"].device)
            return (y if bias is None else y + bias.to(torch.float32)).to(out_dtype)
        left, right = _codes(a, 0), _codes(b, -cols % STEP)
        if a.format.outer_extent == b.format.outer_extent == "tensor":
            scales = a.parts["scale"].reshape(()), b.parts["scale"].reshape(())
        else:
            scales = _per_row(a, left.shape[0]), _per_row(b, right.shape[0]).t()
        fused = bias if bias is None or (out_dtype is bias.dtype is torch.bfloat16 and not cols % STEP) else None
        direct = out_dtype is torch.bfloat16 and fused is bias
        y = torch._scaled_mm(  # type: ignore[reportPrivateImportUsage]
            left,
            right.t(),
            scale_a=scales[0],
            scale_b=scales[1],
            bias=fused,
            out_dtype=out_dtype if direct else torch.float32,
            use_fast_accum=False,
        )
        y = y[:, :cols]
        if direct:
            return y
        return (y if bias is None else y + bias.to(torch.float32)).to(out_dtype)


def _codes(plane: Any, more_rows: int) -> Tensor:
    """The codes with rows next to each other, padded with zeros to what cuBLAS takes."""
    codes = plane.parts["codes"]
    more_cols = -codes.shape[1] % STEP
    if more_cols or more_rows:
        codes = F.pad(codes, (0, more_cols, 0, more_rows))
    return contiguous_rows(codes).view(plane.format.code_dtype)


def _per_row(plane: Any, rows: int) -> Tensor:
    """fp32 (rows, 1) decode scales; those of rows that were added are 1."""
    scale = plane.parts["scale"].reshape(-1, 1)
    if scale.shape[0] == 1:
        return scale.expand(rows, 1).contiguous()
    return F.pad(scale, (0, 0, 0, rows - scale.shape[0]), value=1.0) if rows > scale.shape[0] else scale.contiguous()
