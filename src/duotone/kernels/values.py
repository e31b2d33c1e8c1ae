"""fp32 values in kernels: of elements in memory, and of a norm from its statistics."""

import triton
import triton.language as tl


@triton.jit
def affine(centred, rstd, gamma, beta):
    """centred rstd gamma + beta, without what is None. The last two steps round once, in every kernel alike."""
    result = centred * rstd
    if beta is not None:
        result = tl.fma(result, gamma, beta)
    elif gamma is not None:
        result = result * gamma
    return result


@triton.jit
def wide(x, at, inside):
    """fp32 values, 0 where not `inside`; None without x."""
    if x is None:
        value = None
    elif inside is None:
        value = tl.load(x + at).to(tl.float32)
    else:
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    return value
