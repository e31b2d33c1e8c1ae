"""FP8 attention, forward: softmax(Q K^T) V over codes with one scale per tensor, in blocks of keys from the last on."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from duotone.kernels.launch import Launch, kernel

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
WIDTHS = (64, 128)
"""Of heads, that the kernel takes."""

P_SCALE = 256.0
"""Of probabilities without a delayed scale: the largest power of two that cannot overflow E4M3."""

TILES = {True: (64, 128, 4), False: (64, 64, 4)}
"""Queries and keys of a tile, and warps, by whether sums are fast: the fastest of five on an H200 from 8192 tokens on.
Sums of more bits take a second accumulator, for which larger tiles have no registers."""
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
Options = tuple[float, bool, bool, torch.dtype]
"""Of a call: the scale of scores, whether it is causal, whether sums may have fewer bits, and the dtype of results."""

IMPRECISE = 32
"""Products that Hopper may add up with fewer bits where accumulation is not fast."""


@triton.jit
def _tile(
    state, qt, k, v, rows, d, n, factor, p_scale, TK, k_step, v_step,
    BN: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """The running maximum, sum and output after BN more keys. Scores are in units of log2."""
    peak, total, acc = state
    cols = n + tl.arange(0, BN)
    k_at, v_at = k + cols[None, :].to(tl.int64) * k_step + d[:, None], v + d[None, :].to(tl.int64) * v_step
    if MASKED:
        kt = tl.load(k_at, mask=cols[None, :] < TK, other=0.0)
        vt = tl.load(v_at + cols[:, None], mask=cols[:, None] < TK, other=0.0)
    else:
        kt, vt = tl.load(k_at), tl.load(v_at + cols[:, None])
    scores = tl.dot(qt, kt, max_num_imprecise_acc=FEW) * factor
    if MASKED:
        seen = cols[None, :] < TK
        if CAUSAL:
            seen = seen & (cols[None, :] <= rows[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    now = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(now == float("-inf"), 0.0, now)
    weights, rescale = tl.exp2(scores - base[:, None]), tl.exp2(peak - base)
    acc = tl.dot((weights * p_scale).to(vt.dtype), vt, acc * rescale[:, None], max_num_imprecise_acc=FEW)
    return now, total * rescale + tl.sum(weights, 1), acc


@kernel
def attend_kernel(
    q, k, v, q_scale, k_scale, v_scale, p_scale, out, lse, TQ, TK, v_step, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, FEW: tl.constexpr, P: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A program has BM queries of one head. q, k and out are (batch, tokens, heads, D), v is (G, D, batch, tokens).

    The longest programs of causal attention come first. lse is (batch, H, TQ).
    """
    tiles = tl.cdiv(TQ, BM)
    across = tl.num_programs(0) // tiles
    m, head = tiles - 1 - tl.program_id(0) // across, tl.program_id(0) % across
    b, h = (head // H).to(tl.int64), head % H
    g = h // (H // G)
    rows, d = m * BM + tl.arange(0, BM), tl.arange(0, D)
    place = ((b * TQ + rows) * H + h)[:, None] * D + d[None, :]
    qt = tl.load(q + place, mask=rows[:, None] < TQ, other=0.0)
    k_of, v_of = k + (b * TK * G + g) * D, v + g.to(tl.int64) * D * v_step + b * TK
    factor = tl.load(q_scale) * tl.load(k_scale) * scale * LOG2E
    of_p = tl.load(p_scale) if p_scale is not None else P
    last = tl.minimum(TK, (m + 1) * BM) if CAUSAL else TK
    blocks = tl.cdiv(last, BN)
    whole = tl.minimum(TK, m * BM + 1) // BN if CAUSAL else TK // BN
    state = tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM, D], tl.float32)
    for i in range(0, blocks - whole):
        n = (blocks - 1 - i) * BN
        state = _tile(state, qt, k_of, v_of, rows, d, n, factor, of_p, TK, G * D, v_step, BN, CAUSAL, True, FEW)
    for i in range(0, whole):
        n = (whole - 1 - i) * BN
        state = _tile(state, qt, k_of, v_of, rows, d, n, factor, of_p, TK, G * D, v_step, BN, CAUSAL, False, FEW)
    peak, total, acc = state
    empty = total == 0.0
    by = tl.where(empty, 0.0, tl.load(v_scale) / (of_p * total))
    tl.store(out + place, tl.where(empty[:, None], 0.0, acc * by[:, None]).to(DTYPE), mask=rows[:, None] < TQ)
    logarithm = tl.where(empty, 0.0, (peak + tl.log2(total)) / LOG2E)
    tl.store(lse + head.to(tl.int64) * TQ + rows, logarithm, mask=rows < TQ)


@functools.cache
def _launch(
    heads: int,
    groups: int,
    width: int,
    causal: bool,
    fast: bool,
    dtype: torch.dtype,
    tiles: tuple[int, int, int],
    is_delayed: bool,
) -> Launch:
    """`is_delayed`: whether calls have a `p_scale`. A launch takes a tensor in all of its calls or in none."""
    queries, keys, warps = tiles
    constants = {
        "H": heads, "G": groups, "D": width, "BM": queries, "BN": keys, "CAUSAL": causal,
        "FEW": None if fast else IMPRECISE, "P": P_SCALE,
        "DTYPE": DTYPES[dtype],
    }  # fmt: skip
    return attend_kernel.bind(constants, warps)


def attend(
    codes: tuple[Tensor, Tensor, Tensor],
    scales: tuple[Tensor, Tensor, Tensor],
    p_scale: Tensor | None,
    options: Options,
    tiles: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The output (batch, queries, heads, width), and fp32 log-sum-exp (batch, heads, queries).

    Codes are float8_e4m3fn: of query (batch, queries, heads, width), of key (batch, keys, groups, width), and of value
    (groups, width, batch, keys). `scales` are what codes are multiplied by, fp32 (1,), and `p_scale` what probabilities
    are.
    """
    (q, k, v), (scale, causal, fast, dtype) = codes, options
    tiles = tiles or TILES[fast]
    (batch, queries, heads, width), (keys, groups) = q.shape, k.shape[1:3]
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    launch = _launch(heads, groups, width, causal, fast, dtype, tiles, p_scale is not None)
    programs = -(-queries // tiles[0]) * batch * heads
    launch(programs, (q, k, v, *scales, p_scale, out, lse), (queries, keys, batch * keys), (scale,))
    return out, lse
