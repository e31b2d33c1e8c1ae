"""The epilogue of a product in fp32: factors per tensor or row, a bias, and one rounding, in one pass."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from duotone.allocate import is_aligned
from duotone.kernels.decode import DTYPES
from duotone.kernels.launch import Launch, kernel

NONE, ONE, LINES = (tl.constexpr(i) for i in range(3))
"""The factors of an operand: none, one, or one for each row."""

TILE = (32, 128, 4)


@triton.jit
def scaled(result, rows, cols, m, n, M, N, constant, ROWS: tl.constexpr, COLS: tl.constexpr, CONSTANT: tl.constexpr):
    """result * ((rows * cols) * constant) if each is one number. Otherwise the order is constant, rows, columns. If one
    of rows and columns is a single number, these two are multiplied before. Where rows overflow, columns come first."""
    row, col = 1.0, 1.0
    if ROWS != NONE:
        row = tl.load(rows) if ROWS == ONE else tl.load(rows + m, mask=m < M, other=0.0)
    if COLS != NONE:
        col = tl.load(cols) if COLS == ONE else tl.load(cols + n, mask=n < N, other=0.0)
    if ROWS == LINES or COLS == LINES:
        if CONSTANT:
            result = result * constant
        if ROWS == COLS:
            product = result * row
            overflows = tl.abs(product) == float("inf")
            result = tl.where(overflows, result * col, product) * tl.where(overflows, row, col)
        else:
            result = result * (row * col)
    elif ROWS == ONE or COLS == ONE:
        alpha = row * col
        if CONSTANT:
            alpha = alpha * constant
        result = result * alpha
    return result


@kernel
def epilogue_kernel(
    y, rows, cols, bias, out, M, N, constant,
    ROWS: tl.constexpr, COLS: tl.constexpr, CONSTANT: tl.constexpr, BIAS: tl.constexpr, ADDS: tl.constexpr,
    DTYPE: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr,
):  # fmt: skip
    """One tile of y: scaled, plus the bias and, with ADDS, plus the stored values."""
    across = tl.cdiv(N, TN)
    pm, pn = tl.program_id(0) // across, tl.program_id(0) % across
    i, j = tl.arange(0, TM)[:, None], tl.arange(0, TN)[None, :]
    m, n = pm * TM + i, pn * TN + j
    at, inside = (pm * TM).to(tl.int64) * N + pn * TN + (i * N + j), (m < M) & (n < N)
    result = scaled(tl.load(y + at, mask=inside, other=0.0), rows, cols, m, n, M, N, constant, ROWS, COLS, CONSTANT)
    if BIAS:
        result = result + tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    if ADDS:
        result = result + tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, result.to(DTYPE), mask=inside)


def finish(
    y: Tensor,
    rows: Tensor | None,
    cols: Tensor | None,
    constant: float,
    bias: Tensor | None,
    out: Tensor,
    adds: bool = False,
) -> Tensor:
    """Write the contiguous fp32 product y over the contiguous `out` (M, N), or add it to `out`. Returns `out`.

    `rows` holds 1 or M factors in fp32, `cols` 1 or N.
    """
    m, n = y.shape
    rows, cols, bias = (None if t is None else t.contiguous() for t in (rows, cols, bias))
    aligned = tuple(t is None or is_aligned(t, 16) for t in (rows, cols, bias, out))
    kind = None if bias is None else bias.dtype
    launch = _launch(_extent(rows), _extent(cols), constant != 1.0, kind, adds, out.dtype, aligned)
    tm, tn, _ = TILE
    launch(-(-m // tm) * -(-n // tn), (y, rows, cols, bias, out), (m, n), (constant,))
    return out


def _extent(factors: Tensor | None) -> int:
    if factors is None:
        return NONE.value
    return ONE.value if factors.numel() == 1 else LINES.value


@functools.cache
def _launch(
    rows: int,
    cols: int,
    constant: bool,
    bias: torch.dtype | None,
    adds: bool,
    dtype: torch.dtype,
    aligned: tuple[bool, ...],
) -> Launch:
    """A launch takes dtypes and `aligned` from its first call, so calls that differ in these have separate launches."""
    del aligned
    tm, tn, warps = TILE
    scales = {"ROWS": rows, "COLS": cols, "CONSTANT": constant}
    constants = {**scales, "BIAS": bias is not None, "ADDS": adds, "DTYPE": DTYPES[dtype], "TM": tm, "TN": tn}
    return epilogue_kernel.bind(constants, warps, options={"enable_fp_fusion": False})
