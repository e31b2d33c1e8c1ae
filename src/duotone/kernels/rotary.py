"""Rotary embedding of heads in one read and one write, with the bits of torch's eager operations."""

import functools

import triton.language as tl
from torch import Tensor

from duotone.kernels.launch import Launch, kernel

ELEMENTS = 2048
"""The most pairs that a program turns. They are whole heads of one token."""


@kernel
def rotary_kernel(
    t, out, cos, sin, TOKENS, HEADS, HALF, SB, ST, SH, OB, OT, OH,
    BACK: tl.constexpr, TH: tl.constexpr, TK: tl.constexpr,
):  # fmt: skip
    """Heads (batch, tokens, heads, 2 HALF) at strides S and O by angles (tokens, 2 HALF).

    With BACK a gradient is turned back. Eager torch rounds each of its products.
    """
    DTYPE: tl.constexpr = t.dtype.element_ty
    blocks = tl.cdiv(HEADS, TH)
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    token, batch = row % TOKENS, (row // TOKENS).to(tl.int64)
    head, k = block * TH + tl.arange(0, TH)[:, None], tl.arange(0, TK)[None, :]
    inside, angle = (head < HEADS) & (k < HALF), token * 2 * HALF + k
    at, to = batch * SB + token.to(tl.int64) * ST + head * SH + k, batch * OB + token.to(tl.int64) * OT + head * OH + k
    a, b = tl.load(t + at, mask=inside).to(tl.float32), tl.load(t + at + HALF, mask=inside).to(tl.float32)
    cos_a, cos_b = tl.load(cos + angle, mask=k < HALF), tl.load(cos + angle + HALF, mask=k < HALF)
    sin_a, sin_b = tl.load(sin + angle, mask=k < HALF), tl.load(sin + angle + HALF, mask=k < HALF)
    if BACK:
        first = (a * cos_a).to(DTYPE).to(tl.float32) + (b * sin_b).to(DTYPE).to(tl.float32)
        second = (b * cos_b).to(DTYPE).to(tl.float32) - (a * sin_a).to(DTYPE).to(tl.float32)
    else:
        first, second = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    tl.store(out + to, first.to(DTYPE), mask=inside)
    tl.store(out + to + HALF, second.to(DTYPE), mask=inside)


def turn(t: Tensor, out: Tensor, cos: Tensor, sin: Tensor, back: bool) -> None:
    """Write heads (batch, tokens, heads, width), turned or turned back, to `out` of the same shape.

    `cos` and `sin` are contiguous fp32 (tokens, width). The last stride of `t` and `out` is 1.
    """
    batch, tokens, heads, width = t.shape
    columns = 1 << (width // 2 - 1).bit_length()
    each = min(1 << (heads - 1).bit_length(), max(1, ELEMENTS // columns))
    integers = tokens, heads, width // 2, *t.stride()[:3], *out.stride()[:3]
    _launch(back, each, columns)(batch * tokens * -(-heads // each), (t, out, cos, sin), integers)


@functools.cache
def _launch(back: bool, heads: int, columns: int) -> Launch:
    """Products are rounded before they are added, so nothing becomes an FMA."""
    return rotary_kernel.bind({"BACK": back, "TH": heads, "TK": columns}, options={"enable_fp_fusion": False})
