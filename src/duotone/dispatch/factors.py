"""What follows a product: the operands' epilogue scales, the bias, and one rounding to the dtype of the result."""

import torch
from torch import Tensor

from duotone.formats import Factors


def scaled(y: Tensor, a: Factors, b: Factors) -> Tensor:
    """Apply epilogue scales to an fp32 product: one fl(fl(a b) constant) where both are per tensor, else rows after."""
    if a.epilogue_scale is b.epilogue_scale is None:
        return y
    constant = 1.0 / (a.divisor * b.divisor)
    scales = [scale for scale in (a.epilogue_scale, b.epilogue_scale) if scale is not None]
    if all(scale.numel() == 1 for scale in scales):
        alpha = scales[0].reshape(()) if len(scales) == 1 else scales[0].reshape(()) * scales[1].reshape(())
        return y * (alpha * constant if constant != 1.0 else alpha)
    if constant != 1.0:
        y = y * torch.full((), constant, dtype=torch.float32, device=y.device)
    rows = None if a.epilogue_scale is None else a.epilogue_scale.reshape(-1, 1)
    cols = None if b.epilogue_scale is None else b.epilogue_scale.reshape(1, -1)
    if rows is not None and cols is not None and 1 in (rows.numel(), cols.numel()):
        return y * (rows * cols)
    y = y if rows is None else y * rows
    return y if cols is None else y * cols


def finish(y: Tensor, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """fp32 (M, N), plus `bias` (N,) in fp32, rounded once."""
    return (y if bias is None else y + bias.to(torch.float32)).to(out_dtype)
