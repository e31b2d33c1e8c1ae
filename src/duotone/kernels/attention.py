"""FP8 attention, forward: softmax(Q K^T) V of codes with one scale per tensor, in blocks of keys from the last one."""

import functools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from duotone.kernels.launch import Described, Launch, kernel

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
P_SCALE = 256.0
"""The scale of probabilities without a delayed one: the largest power of two that cannot overflow E4M3."""

TILES = {True: (64, 128, 4), False: (64, 64, 4)}
"""Queries and keys of a tile, and its warps, by whether sums are fast. They are the fastest of five on an H200, from
8192 tokens on. Sums of more bits take a second accumulator, for which larger tiles have no registers."""
WIDE_TILES = {True: (64, 64, 4), False: (64, 64, 8)}
"""The tiles of heads wider than 128: the fastest of four for fast sums."""
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
Options = tuple[float, bool, bool, torch.dtype]
"""The scale of scores, whether a call is causal, whether sums may have fewer bits, and the dtype of results."""

ALIGNED: tl.constexpr = tl.constexpr(16)
"""If FP8 codes lie along tokens, the tokens of each batch start at a multiple of this."""

LEAST: tl.constexpr = tl.constexpr(1e-37)
"""The least factor of scores. It is above 0, because -inf times 0 is NaN."""

IMPRECISE = 32
"""How many products Hopper may add up with fewer bits if accumulation is not fast."""


@triton.jit
def rows_of(plane, b, start, head, tokens, T, MASKED: tl.constexpr, D: tl.constexpr):
    """(tokens, width) of one head, from a descriptor `by_rows`. Tokens from T on belong to others, and are 0."""
    tile = plane.load([b * T + start, head * D])
    return tl.where(tokens[:, None] < T, tile, 0.0) if MASKED else tile


@triton.jit
def columns_of(plane, b, start, head, tokens, T, MASKED: tl.constexpr, D: tl.constexpr):
    """The same from a descriptor `by_columns`."""
    tile = plane.load([head * D, b * (tl.cdiv(T, ALIGNED) * ALIGNED) + start])
    return tl.trans(tl.where(tokens[None, :] < T, tile, 0.0) if MASKED else tile)


@triton.jit
def ends_of(at, rows, T_OUTER, distance):
    """What is stored for each row, and behind it `distance` further."""
    return tl.load(at, mask=rows < T_OUTER, other=0), tl.load(at + distance, mask=rows < T_OUTER, other=0)


@triton.jit
def sight(spans, mask, step, rows, b, T_OUTER, T, BN: tl.constexpr, CAUSAL: tl.constexpr, OF_KEYS: tl.constexpr):
    """The first token that each row sees and the one after the last: from spans, or else all tokens or the causal ones.
    Then steps of BN tokens: in [edge, full) all rows see all tokens, in [first, edge) and [full, last) some of them.

    Rows are queries that see keys, or keys and the queries that see them. Spans are (batch or 1, 2, queries + keys), or
    (batch or 1, 4, ...) with a mask: then a row sees tokens between the last two.
    """
    if spans is not None:
        at, both = spans + b.to(tl.int64) * step + rows + (T if OF_KEYS else 0), T_OUTER + T
        low, high = ends_of(at, rows, T_OUTER, both)
        inner, outer = (low, high) if mask is None else ends_of(at + 2 * both, rows, T_OUTER, both)
    else:
        low, high = rows if CAUSAL and OF_KEYS else rows * 0, rows * 0 + T
        high = tl.minimum(rows + 1, T) if CAUSAL and not OF_KEYS else high
        inner, outer = low, high
    last = tl.cdiv(tl.max(tl.where(low < high, high, 0), 0), BN)
    first = tl.minimum(tl.min(tl.where(low < high, low, T), 0) // BN, last)
    edge = tl.minimum(tl.maximum(tl.cdiv(tl.max(inner, 0), BN), first), last)
    full = tl.minimum(tl.maximum(tl.min(outer, 0) // BN, edge), last)
    return low, high, first, edge, full, last


@triton.jit
def seen_by(mask, sees, tokens):
    """Bool (rows, tokens): a row sees tokens in [low, high). A mask (bool as bytes) hides the tokens where it is 0."""
    low, high, rows, of_row, of_token = sees
    seen = (tokens[None, :] >= low[:, None]) & (tokens[None, :] < high[:, None])
    if mask is not None:
        at = mask + rows[:, None].to(tl.int64) * of_row + tokens[None, :].to(tl.int64) * of_token
        seen = tl.load(at, mask=seen, other=0) != 0
    return seen


@triton.jit
def _tile(
    state, qt, k, v, mask, sees, b, g, n, factor, log_p, TK,
    BN: tl.constexpr, MASKED: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """The largest score, sum and output after BN more keys. Sum and output are multiplied by 2^log_p."""
    peak, total, acc = state
    D: tl.constexpr = qt.shape[1]
    cols = n + tl.arange(0, BN)
    kt, vt = rows_of(k, b, n, g, cols, TK, False, D), columns_of(v, b, n, g, cols, TK, MASKED, D)
    scores = tl.dot(qt, tl.trans(kt), max_num_imprecise_acc=FEW)
    if MASKED:
        scores = tl.where(seen_by(mask, sees, cols), scores, float("-inf"))
    now = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(now == float("-inf"), 0.0, now) * factor
    weights, rescale = tl.exp2(scores * factor - (base - log_p)[:, None]), tl.exp2(peak * factor - base)
    acc = tl.dot(weights.to(vt.dtype), vt, acc * rescale[:, None], max_num_imprecise_acc=FEW)
    return now, total * rescale + tl.sum(weights, 1), acc


@kernel
def attend_kernel(
    k, v, q, q_scale, k_scale, v_scale, p_scale, spans, mask, out, lse,
    TQ, TK, step, of_batch, of_head, of_query, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, FEW: tl.constexpr, P: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A program has BM queries of one head. q and out are (batch, tokens, heads, D); k and v are descriptors.

    The longest programs of causal attention come first. lse is (batch, H, TQ). A mask comes with spans around it.
    """
    tiles = tl.cdiv(TQ, BM)
    across = tl.num_programs(0) // tiles
    m, head = tiles - 1 - tl.program_id(0) // across, tl.program_id(0) % across
    b, h = head // H, head % H
    g = h // (H // G)
    rows, d = m * BM + tl.arange(0, BM), tl.arange(0, D)
    place = ((b.to(tl.int64) * TQ + rows) * H + h)[:, None] * D + d[None, :]
    qt = tl.load(q + place, mask=rows[:, None] < TQ, other=0.0)
    # the factor is above 0, so that the largest product has the largest score
    qt = tl.where(scale < 0.0, -qt.to(tl.float32), qt.to(tl.float32)).to(qt.dtype)
    factor = tl.load(q_scale) * tl.load(k_scale) * tl.abs(scale) * LOG2E
    factor = tl.where(factor < LEAST, LEAST, factor)
    log_p = tl.log2(tl.load(p_scale) if p_scale is not None else P)
    low, high, first, edge, full, last = sight(spans, mask, step, rows, b, TQ, TK, BN, CAUSAL, False)
    if mask is not None:
        mask += b.to(tl.int64) * of_batch + h.to(tl.int64) * of_head
    sees = low, high, rows, of_query, 1
    state = tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM, D], tl.float32)
    for i in tl.range(0, last - full, num_stages=1 if mask is None else 3):
        n = (last - 1 - i) * BN
        state = _tile(state, qt, k, v, mask, sees, b, g, n, factor, log_p, TK, BN, True, FEW)
    for i in range(0, full - edge):
        n = (full - 1 - i) * BN
        state = _tile(state, qt, k, v, mask, sees, b, g, n, factor, log_p, TK, BN, False, FEW)
    if spans is not None:
        for i in tl.range(0, edge - first, num_stages=1 if mask is None else 3):
            n = (edge - 1 - i) * BN
            state = _tile(state, qt, k, v, mask, sees, b, g, n, factor, log_p, TK, BN, True, FEW)
    peak, total, acc = state
    empty = total == 0.0
    by = tl.where(empty, 0.0, tl.load(v_scale) / total)
    tl.store(out + place, tl.where(empty[:, None], 0.0, acc * by[:, None]).to(DTYPE), mask=rows[:, None] < TQ)
    logarithm = tl.where(empty, 0.0, (peak * factor + tl.log2(total) - log_p) / LOG2E)
    tl.store(lse + head.to(tl.int64) * TQ + rows, logarithm, mask=rows < TQ)


def by_rows(x: Tensor, tokens: int) -> Described:
    """Tiles of `tokens` and the width of one head, of x (batch, tokens, heads, width)."""
    rows, across = x.shape[0] * x.shape[1], x.shape[2] * x.shape[3]
    return Described(x, [rows, across], [across, 1], [tokens, x.shape[3]])


def by_columns(x: Tensor, tokens: int) -> Described:
    """Tiles of the width of one head and `tokens`, of FP8 codes (heads, width, batch, tokens)."""
    if missing := -x.shape[3] % ALIGNED.value:  # descriptors read from multiples of 16 bytes on
        x = F.pad(x.view(torch.uint8), (0, missing)).view(x.dtype)
    rows, across = x.shape[0] * x.shape[1], x.shape[2] * x.shape[3]
    return Described(x, [rows, across], [across, 1], [x.shape[1], tokens])


def steps_between(spans: Tensor | None, mask: Tensor | None) -> tuple[int, int, int, int]:
    """The stride of the batches of spans, and the strides of the mask's batches, heads and queries."""
    step = 0 if spans is None or spans.shape[0] == 1 else spans.stride(0)
    if mask is None:
        return step, 0, 0, 0
    of_batch, of_head, of_query = (0 if n == 1 else d for n, d in zip(mask.shape[:3], mask.stride(), strict=False))
    return step, of_batch, of_head, of_query


@functools.cache
def _launch(
    heads: int,
    groups: int,
    width: int,
    causal: bool,
    fast: bool,
    dtype: torch.dtype,
    tiles: tuple[int, int, int],
    variant: tuple[bool, ...],
) -> Launch:
    """`variant` says whether calls have a `p_scale`, spans and a mask. All calls of a launch are alike in this."""
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
    spans: Tensor | None = None,
    mask: Tensor | None = None,
    tiles: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The output (batch, queries, heads, width), and fp32 log-sum-exp (batch, heads, queries).

    - Codes are float8_e4m3fn: query (batch, queries, heads, width), key (batch, keys, groups, width), value (groups,
      width, batch, keys).
    - `scales` multiply the codes, fp32 (1,) each; `p_scale` multiplies the probabilities.
    - `spans`, int32 (batch or 1, 2, queries + keys): the first key that each query sees and the one after the last,
      then the same of the queries that see each key. None: all keys, or the causal ones.
    - `mask`, bool (batch or 1, heads or 1, queries or 1, keys), with keys next to each other: which keys are seen.
    """
    (q, k, v), (scale, causal, fast, dtype) = codes, options
    (batch, queries, heads, width), (keys, groups) = q.shape, k.shape[1:3]
    tiles = tiles or (WIDE_TILES if width > 128 else TILES)[fast]
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    variant = p_scale is not None, spans is not None, mask is not None
    launch = _launch(heads, groups, width, causal, fast, dtype, tiles, variant)
    programs = -(-queries // tiles[0]) * batch * heads
    descriptors = by_rows(k, tiles[1]), by_columns(v, tiles[1])
    integers = queries, keys, *steps_between(spans, mask)
    mask = mask if mask is None else mask.view(torch.uint8)
    launch(programs, (q, *scales, p_scale, spans, mask, out, lse), integers, (scale,), descriptors)
    return out, lse
