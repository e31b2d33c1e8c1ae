"""Decoding a plane in one kernel: codes times stored scales, to bf16 or fp32."""

import functools

import torch
import triton.language as tl
from torch import Tensor

from duotone.kernels.cast import PlaneSpec
from duotone.kernels.elements import ELEMENTS
from duotone.kernels.launch import Launch, kernel
from duotone.kernels.scaling import CODECS, E8M0, power_of_two

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float16: tl.float16}
TILE = (64, 128, 4)


@kernel
def decode_kernel(
    codes,
    scales,
    out,
    M,
    K,
    ACROSS,
    DOWN,
    ELEMENT: tl.constexpr,
    DTYPE: tl.constexpr,
    CODEC: tl.constexpr,
    SCALED: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    TM: tl.constexpr,
    TK: tl.constexpr,
    EVEN: tl.constexpr,
):
    """value(code) * scale, rounded once. Scales of the grid lie DOWN and ACROSS apart."""
    across = tl.cdiv(K, TK)
    pm, pk = tl.program_id(0) // across, tl.program_id(0) % across
    im, ik = tl.arange(0, TM), tl.arange(0, TK)
    start = (pm * TM).to(tl.int64) * K + pk * TK
    inner = im[:, None] * K + ik[None, :]
    inside = EVEN | (((pm * TM + im)[:, None] < M) & ((pk * TK + ik)[None, :] < K))
    code = tl.load(codes + start + inner, mask=inside, other=0).to(ELEMENT, bitcast=True)
    value = code.to(tl.float32)
    if SCALED:
        if R >= TM:
            bm = pm * TM // R + tl.arange(0, 1)
        else:
            bm = pm * (TM // R) + tl.arange(0, TM // R)
        if C >= TK:
            bk = pk * TK // C + tl.arange(0, 1)
        else:
            bk = pk * (TK // C) + tl.arange(0, TK // C)
        exists = (bm[:, None] < tl.cdiv(M, R)) & (bk[None, :] < tl.cdiv(K, C))
        scale = tl.load(scales + bm[:, None] * DOWN + bk[None, :] * ACROSS, mask=exists, other=0)
        if CODEC == E8M0:
            scale = power_of_two(scale.to(tl.int32))
        GM: tl.constexpr = TM // R if R < TM else 1
        GK: tl.constexpr = TK // C if C < TK else 1
        spread = tl.broadcast_to(scale[:, None, :, None], [GM, TM // GM, GK, TK // GK])
        value = value * tl.reshape(spread, [TM, TK])
    tl.store(out + start + inner, value.to(DTYPE), mask=inside)


def decode(spec: PlaneSpec, codes: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(M, K) values of contiguous codes, in `dtype`. Without `scales`, the values of the codes alone."""
    m, k = codes.shape
    tm, tk, _ = TILE
    out = torch.empty((m, k), dtype=dtype, device=codes.device)
    down, across = (0, 0) if scales is None or scales.dim() == 1 else scales.stride()
    even = not (m % tm or k % tk)
    launch = _launch(spec, dtype, scales is not None, even)
    launch(-(-m // tm) * -(-k // tk), (codes, scales, out), (m, k, across, down))
    return out


@functools.cache
def _launch(spec: PlaneSpec, dtype: torch.dtype, scaled: bool, even: bool) -> Launch:
    tm, tk, warps = TILE
    constants = {
        "ELEMENT": ELEMENTS[spec.element],
        "DTYPE": DTYPES[dtype],
        "CODEC": CODECS[spec.codec],
        "SCALED": scaled,
        "R": spec.rows or WHOLE,
        "C": spec.cols or WHOLE,
        "TM": tm,
        "TK": tk,
        "EVEN": even,
    }
    return decode_kernel.bind(constants, warps)


WHOLE = 1 << 30
"""The extent of a block that spans the matrix: an index divided by it is 0."""
