"""Attention, backward: the gradients of query, key and value, each product in FP8 or in high precision.

    S  = Q K^T     reads rowwise planes of query and key
    dP = dO V^T    reads rowwise planes of the gradient and value
    dV = P^T dO    reads the columnwise plane of the gradient in FP8, else its rows
    dQ = dS K      reads the columnwise plane of the key in FP8, else its rows
    dK = dS^T Q    reads the columnwise plane of the query in FP8, else its rows

Tensor cores read FP8 along the sum, so a sum over tokens needs a columnwise plane. P and dS exist in registers alone.
One launch computes the gradients of keys and values, another one those of queries, so S and dP are computed twice. No
sum is atomic, so every run has the same bits.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from duotone.kernels.attention import (
    DTYPES,
    IMPRECISE,
    LOG2E,
    P_SCALE,
    Options,
    by_columns,
    by_rows,
    columns_of,
    rows_of,
    seen_by,
    sight,
    steps_between,
)
from duotone.kernels.elements import ELEMENTS
from duotone.kernels.launch import Kernel, Launch, kernel

Tiles = tuple[int, int, int, int]
"""Tokens whose gradients a program computes, tokens of a step of its loop, warps, and stages of loads."""

CHUNK: tl.constexpr = tl.constexpr(64)
"""Steps after which a sum of FP8 products is added to a sum in fp32, because Hopper adds them up with fewer bits."""

P_SCALES = {None: 1.0, torch.float8_e4m3fn: P_SCALE, torch.float8_e5m2: 2.0**15}
"""The scale of probabilities without a delayed one, by their format."""

DELTA_TILES: Tiles = 32, 1, 4, 3


@triton.jit
def _value(scale):
    return 1.0 if scale is None else tl.load(scale)


@triton.jit
def _over_tokens(plane, b, start, head, tokens, T, MASKED: tl.constexpr, D: tl.constexpr):
    """(tokens, width) for a sum over tokens, from a columnwise plane if it is FP8."""
    FP8: tl.constexpr = plane.dtype.is_fp8()
    if FP8:
        return columns_of(plane, b, start, head, tokens, T, MASKED, D)
    else:
        return rows_of(plane, b, start, head, tokens, T, MASKED, D)


@triton.jit
def _add(weights, other, acc, FMT: tl.constexpr, FEW: tl.constexpr):
    """acc + weights @ other. Weights are rounded to FMT, or else to the dtype of the other operand."""
    FP8: tl.constexpr = other.dtype.is_fp8()
    rounded = weights if FMT is None else weights.to(FMT)
    return tl.dot(rounded if FP8 else rounded.to(other.dtype), other, acc, max_num_imprecise_acc=FEW if FP8 else None)


@triton.constexpr_function
def _limit(fmt):
    return 448.0 if fmt == tl.float8e4nv else 57344.0


@triton.jit
def _fitted(ds, acc, peak, FMT: tl.constexpr):
    """dS in its format, under the largest |dS| of each row so far; the sum in these units; the new largest |dS|."""
    now = tl.maximum(peak, tl.max(tl.abs(ds), 1))
    by = tl.where(now > 0.0, _limit(FMT) / now, 1.0)
    rescale = tl.where(now > 0.0, peak / now, 1.0)
    return ds * by[:, None], acc * rescale[:, None], now


@triton.jit
def _weights(outer, inner, logs, mask, sees, tokens, factor, MASKED: tl.constexpr, FEW: tl.constexpr):
    """Probabilities (outer tokens, tokens). Either the outer tokens are keys and the others queries, or the reverse."""
    weights = tl.exp2(tl.dot(outer, tl.trans(inner), max_num_imprecise_acc=FEW) * factor - logs)
    if MASKED:
        weights = tl.where(seen_by(mask, sees, tokens), weights, 0.0)
    return weights


@triton.jit
def _key_tile(
    state, k_tile, v_tile, q, do, q_sum, do_sum, lse, delta, mask, sees, b, h, start, T, factor, p_factor, ds_scale,
    MASKED: tl.constexpr, FEW: tl.constexpr, P_FMT: tl.constexpr, FMT: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """The sums of dV and dK after BN more queries, and the largest |dS| of each key."""
    acc_v, acc_k, peak = state
    D: tl.constexpr = k_tile.shape[1]
    tokens = start + tl.arange(0, BN)
    inner = rows_of(q, b, start, h, tokens, T, MASKED, D)
    logs = tl.load(lse + tokens, mask=tokens < T, other=0.0) if MASKED else tl.load(lse + tokens)
    deltas = tl.load(delta + tokens, mask=tokens < T, other=0.0) if MASKED else tl.load(delta + tokens)
    weights = _weights(k_tile, inner, logs[None, :], mask, sees, tokens, factor, MASKED, FEW)
    acc_v = _add(weights, _over_tokens(do_sum, b, start, h, tokens, T, MASKED, D), acc_v, P_FMT, None)
    inner = rows_of(do, b, start, h, tokens, T, MASKED, D)
    dp = tl.dot(v_tile, tl.trans(inner), max_num_imprecise_acc=FEW) * p_factor
    ds = weights * (dp - (deltas if ds_scale is None else deltas * ds_scale)[None, :])
    if FMT is not None and ds_scale is None:
        ds, acc_k, peak = _fitted(ds, acc_k, peak, FMT)
    acc_k = _add(ds, _over_tokens(q_sum, b, start, h, tokens, T, MASKED, D), acc_k, FMT, None)
    return acc_v, acc_k, peak


@kernel
def keys_kernel(
    q, do, q_sum, do_sum, k, v, k_scale, v_scale, q_scale, do_scale, q_sum_scale, do_sum_scale, p_scale, ds_scale,
    spans, mask, lse, delta, dk, dv, TK, T, step, of_batch, of_head, of_query, scale,
    G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
    FEW: tl.constexpr, P_FMT: tl.constexpr, P: tl.constexpr, FMT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The gradients of BM keys and values of one of G heads. k, v and gradients are (batch, tokens, G, D).

    q and do are descriptors by rows of planes for sums over the width, q_sum and do_sum those for sums over tokens.
    lse and delta are (batch, H, queries). lse is in units of log2, less the log2 of the scale of P. `p_scale` and
    `ds_scale` are delayed scales. The longest programs of causal attention come first.
    """
    across = tl.num_programs(0) // tl.cdiv(TK, BM)
    block, head = tl.program_id(0) // across, tl.program_id(0) % across
    b, g = head // G, head % G
    keys, d = block * BM + tl.arange(0, BM), tl.arange(0, D)
    place, inside = ((b.to(tl.int64) * TK + keys) * G + g)[:, None] * D + d[None, :], keys[:, None] < TK
    k_tile, v_tile = tl.load(k + place, mask=inside, other=0.0), tl.load(v + place, mask=inside, other=0.0)
    factor = _value(q_scale) * _value(k_scale) * scale * LOG2E
    of_p = tl.load(p_scale) if p_scale is not None else P
    # P is multiplied by its scale as it is computed, and so dS too.
    ds_by = None if ds_scale is None else tl.load(ds_scale) / of_p
    p_factor = _value(do_scale) * _value(v_scale) * (1.0 if ds_scale is None else ds_by)
    low, high, first, edge, full, last = sight(spans, mask, step, keys, b, TK, T, BN, CAUSAL, True)
    sees = low, high, keys, 1, of_query
    FITTED: tl.constexpr = FMT is not None and ds_scale is None
    zeros = tl.zeros([BM, D], tl.float32)
    sum_v, sum_k, state = zeros, zeros, (zeros, zeros, tl.zeros([BM], tl.float32))
    for r in range(H // G):
        h = g * (H // G) + r
        logs, deltas = lse + (b.to(tl.int64) * H + h) * T, delta + (b.to(tl.int64) * H + h) * T
        of_h = None if mask is None else mask + b.to(tl.int64) * of_batch + h.to(tl.int64) * of_head
        for i in tl.range(0, edge - first + last - full, num_stages=1 if mask is None else 2):
            n = first + i
            start = tl.where(n < edge, n, n - edge + full) * BN
            state = _key_tile(
                state, k_tile, v_tile, q, do, q_sum, do_sum, logs, deltas, of_h, sees, b, h, start, T, factor, p_factor,
                ds_by, True, FEW, P_FMT, FMT, BN,
            )  # fmt: skip
        for chunk in tl.range(edge, full, CHUNK, num_stages=1):
            for n in range(chunk, tl.minimum(chunk + CHUNK, full)):
                state = _key_tile(
                    state, k_tile, v_tile, q, do, q_sum, do_sum, logs, deltas, of_h, sees, b, h, n * BN, T, factor,
                    p_factor, ds_by, False, FEW, P_FMT, FMT, BN,
                )  # fmt: skip
            acc_v, acc_k, peak = state
            if P_FMT is not None:
                sum_v, acc_v = sum_v + acc_v, zeros
            if FMT is not None:
                sum_k, acc_k = sum_k + (acc_k * peak[:, None] if FITTED else acc_k), zeros
            state = acc_v, acc_k, peak
    acc_v, acc_k, peak = state
    if FMT is not None:
        acc_k = sum_k + (acc_k * peak[:, None] if FITTED else acc_k)
    by = _value(q_sum_scale) * scale / (of_p if ds_scale is None else tl.load(ds_scale))
    if FITTED:
        by = by / _limit(FMT)
    tl.store(dk + place, (acc_k * by).to(DTYPE), mask=inside)
    tl.store(dv + place, ((acc_v + sum_v) * (_value(do_sum_scale) / of_p)).to(DTYPE), mask=inside)


@triton.jit
def _query_tile(
    state, q_tile, do_tile, k, v, k_sum, logs, deltas, mask, sees, b, g, start, T, factor, p_factor,
    MASKED: tl.constexpr, FEW: tl.constexpr, FMT: tl.constexpr, BN: tl.constexpr,
    FITTED: tl.constexpr,
):  # fmt: skip
    """The sum of dQ after BN more keys, and the largest |dS| of each query."""
    acc, peak = state
    D: tl.constexpr = q_tile.shape[1]
    tokens = start + tl.arange(0, BN)
    inner = rows_of(k, b, start, g, tokens, T, MASKED, D)
    weights = _weights(q_tile, inner, logs, mask, sees, tokens, factor, MASKED, FEW)
    inner = rows_of(v, b, start, g, tokens, T, MASKED, D)
    ds = weights * (tl.dot(do_tile, tl.trans(inner), max_num_imprecise_acc=FEW) * p_factor - deltas)
    if FITTED:
        ds, acc, peak = _fitted(ds, acc, peak, FMT)
    elif FMT is not None:
        peak = tl.maximum(peak, tl.max(tl.abs(ds), 1))
    acc = _add(ds, _over_tokens(k_sum, b, start, g, tokens, T, MASKED, D), acc, FMT, BN)
    return acc, peak


@kernel
def queries_kernel(
    k, v, k_sum, q, do, q_scale, do_scale, k_scale, v_scale, k_sum_scale, p_scale, ds_scale, spans, mask, lse, delta,
    dq, peaks, TQ, T, step, of_batch, of_head, of_query, scale,
    G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
    FEW: tl.constexpr, P: tl.constexpr, FMT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The gradients of BM queries of one of H heads, like `keys_kernel`. `peaks`: the largest |dS| of each program."""
    blocks = tl.cdiv(TQ, BM)
    across = tl.num_programs(0) // blocks
    block, head = blocks - 1 - tl.program_id(0) // across, tl.program_id(0) % across
    b, h = head // H, head % H
    g = h // (H // G)
    queries, d = block * BM + tl.arange(0, BM), tl.arange(0, D)
    place, inside = ((b.to(tl.int64) * TQ + queries) * H + h)[:, None] * D + d[None, :], queries[:, None] < TQ
    q_tile, do_tile = tl.load(q + place, mask=inside, other=0.0), tl.load(do + place, mask=inside, other=0.0)
    at = head.to(tl.int64) * TQ + queries
    factor = _value(q_scale) * _value(k_scale) * scale * LOG2E
    FITTED: tl.constexpr = FMT is not None and ds_scale is None
    ds_by = _value(ds_scale)
    logs = tl.load(lse + at, mask=queries < TQ, other=0.0) + tl.log2(tl.load(p_scale) if p_scale is not None else P)
    deltas = tl.load(delta + at, mask=queries < TQ, other=0.0) * ds_by
    p_factor = _value(do_scale) * _value(v_scale) * ds_by
    low, high, first, edge, full, last = sight(spans, mask, step, queries, b, TQ, T, BN, CAUSAL, False)
    if mask is not None:
        mask += b.to(tl.int64) * of_batch + h.to(tl.int64) * of_head
    sees = low, high, queries, of_query, 1
    state = tl.zeros([BM, D], tl.float32), tl.zeros([BM], tl.float32)
    for i in tl.range(0, edge - first + last - full, num_stages=1 if mask is None else 2):
        n = first + i
        start = tl.where(n < edge, n, n - edge + full) * BN
        state = _query_tile(
            state, q_tile, do_tile, k, v, k_sum, logs[:, None], deltas[:, None], mask, sees, b, g, start, T, factor,
            p_factor, True, FEW, FMT, BN, FITTED,
        )  # fmt: skip
    for n in range(edge, full):
        state = _query_tile(
            state, q_tile, do_tile, k, v, k_sum, logs[:, None], deltas[:, None], mask, sees, b, g, n * BN, T, factor,
            p_factor, False, FEW, FMT, BN, FITTED,
        )  # fmt: skip
    acc, peak = state
    by = _value(k_sum_scale) * scale / ds_by
    if FITTED:
        acc = acc * (peak / _limit(FMT))[:, None]
    tl.store(dq + place, (acc * by).to(DTYPE), mask=inside)
    if peaks is not None:
        tl.store(peaks + tl.program_id(0), tl.max(peak, 0) / ds_by)


@kernel
def delta_kernel(
    do, out, do_scale, out_scale, p_scale, lse, delta, logs, ROWS, T,
    H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """rowsum(dO * O) of BM rows (batch, tokens, H, D), as (batch, H, tokens), and the log-sum-exp in units of log2.

    The latter is less log2 of what P is multiplied by.
    """
    rows, d = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM), tl.arange(0, D)
    at, inside = rows[:, None] * D + d[None, :], rows[:, None] < ROWS
    product = tl.load(do + at, mask=inside, other=0.0).to(tl.float32)
    product *= tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    b, t, h = rows // (H * T), rows // H % T, rows % H
    total = tl.sum(product, 1) * (_value(do_scale) * _value(out_scale))
    place = (b * H + h) * T + t
    tl.store(delta + place, total, mask=rows < ROWS)
    of_p = tl.load(p_scale) if p_scale is not None else P
    tl.store(logs + place, tl.load(lse + place, mask=rows < ROWS) * LOG2E - tl.log2(of_p), mask=rows < ROWS)


class Operand(NamedTuple):
    """Values of a plane, and the factor that they are multiplied by: fp32 (1,), or None."""

    values: Tensor
    scale: Tensor | None


class BackwardOperands(NamedTuple):
    """What the products of backward read: planes for sums over the width of heads, and for sums over their tokens.

    FP8 planes for sums over tokens are (heads, width, batch, tokens), all others (batch, tokens, heads, width).
    """

    q_row: Operand
    q_col: Operand
    k_row: Operand
    k_col: Operand
    v_row: Operand
    do_row: Operand
    do_col: Operand
    out: Operand


class Weights(NamedTuple):
    """How P and dS are rounded: formats or None for high precision, and delayed scales or None."""

    p: torch.dtype | None
    ds: torch.dtype | None
    p_scale: Tensor | None
    ds_scale: Tensor | None


class Logs(NamedTuple):
    """fp32 (batch, heads, queries): the log-sum-exp in units of log2, less log2 of the scale of P, and D."""

    lse: Tensor
    delta: Tensor


@functools.cache
def _launch(function: Kernel, constants: tuple[tuple[str, object], ...], tiles: Tiles, variant: object) -> Launch:
    """`variant`: dtypes, and which tensors are None. These are the same in all calls of a launch."""
    return function.bind({"BM": tiles[0], "BN": tiles[1], **dict(constants)}, *tiles[2:])


def _run(
    function: Kernel,
    constants: dict[str, object],
    tiles: Tiles,
    inner: tuple[tuple[Operand, ...], tuple[Operand, ...]],
    outer: tuple[Operand, ...],
    others: tuple[Tensor | None, ...],
    steps: tuple[int, ...],
    scale: float,
) -> None:
    """Launch programs for tokens of `outer`. `inner` are the planes that they walk over: by rows, and over tokens."""
    (batch, tokens, heads, _), count = outer[0].values.shape, inner[0][0].values.shape[1]
    rows, columns = inner
    descriptors = [by_rows(x.values, tiles[1]) for x in rows]
    descriptors += [(by_columns if x.values.dtype in ELEMENTS else by_rows)(x.values, tiles[1]) for x in columns]
    tensors = (*(x.values for x in outer), *(x.scale for x in (*outer, *rows, *columns)), *others)
    variant = tuple(None if x is None else x.dtype for x in (*tensors, *(each.base for each in descriptors)))
    launch = _launch(function, tuple(constants.items()), tiles, variant)
    launch(-(-tokens // tiles[0]) * batch * heads, tensors, (tokens, count, *steps), (scale,), tuple(descriptors))


def prepared(do: Operand, out: Operand, lse: Tensor, weights: Weights) -> Logs:
    """D = rowsum(dO * O) and the log-sum-exp as the kernels read them."""
    batch, tokens, heads, width = do.values.shape
    logs = Logs(torch.empty_like(lse), torch.empty_like(lse))
    tensors = (do.values, out.values, do.scale, out.scale, weights.p_scale, lse, logs.delta, logs.lse)
    variant = tuple(None if x is None else x.dtype for x in tensors)
    constants = ("H", heads), ("D", width), ("P", P_SCALES[weights.p])
    rows = batch * tokens * heads
    _launch(delta_kernel, constants, DELTA_TILES, variant)(-(-rows // DELTA_TILES[0]), tensors, (rows, tokens))
    return logs


def tiles_for(x: BackwardOperands, weights: Weights, is_hopper: bool = True) -> tuple[Tiles, Tiles]:
    """The tiles of the launches for keys and for queries: the fastest on an H200 at 16384 tokens.

    sm100 has too few registers for them if each row of dS has a scale in FP8 and queries are in high precision.
    """
    is_wide, high = x.v_row.values.shape[-1] > 128, x.do_row.values.dtype not in ELEMENTS
    if not is_hopper and high and weights.ds is not None and x.q_col.values.dtype not in ELEMENTS:
        return ((32, 32, 8, 2), (64, 64, 8, 2)) if is_wide else ((64, 64, 8, 2), (128, 64, 8, 3))
    if is_wide:
        return (64, 32, 8, 2), (64, 64, 8, 2)
    if high:
        return (128, 64, 8, 3), (128, 64, 8, 3)
    return (64, 64, 4, 2), (64, 64, 4, 3) if weights.ds is None else (64, 128, 4, 2)


def differentiate(
    x: BackwardOperands,
    weights: Weights,
    lse: Tensor,
    options: Options,
    spans: Tensor | None = None,
    mask: Tensor | None = None,
    tiles: tuple[Tiles, Tiles] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key and value (batch, tokens, heads, width), and the amax of dS or 0.

    `lse` is fp32 (batch, heads, queries), `spans` and `mask` are those of forward. The amax is that of a delayed dS.
    """
    scale, causal, fast, dtype = options
    tiles = tiles or tiles_for(x, weights)
    dv, dk, dq = (torch.empty_like(each.values, dtype=dtype) for each in (x.v_row, x.k_row, x.q_row))
    (batch, queries, heads, width), groups = dq.shape, dk.shape[2]
    logs, delayed = prepared(x.do_row, x.out, lse, weights), weights.ds_scale
    peaks = None if delayed is None else lse.new_empty(-(-queries // tiles[1][0]) * batch * heads)
    constants = {
        "G": groups, "H": heads, "D": width, "CAUSAL": causal, "FEW": None if fast else IMPRECISE,
        "P": P_SCALES[weights.p], "FMT": weights.ds and ELEMENTS[weights.ds], "DTYPE": DTYPES[dtype],
    }  # fmt: skip
    with_p = {**constants, "P_FMT": weights.p and ELEMENTS[weights.p]}
    steps, mask = steps_between(spans, mask), mask if mask is None else mask.view(torch.uint8)
    shared = weights.p_scale, delayed, spans, mask, *logs
    inner, outer = ((x.q_row, x.do_row), (x.q_col, x.do_col)), (x.k_row, x.v_row)
    _run(keys_kernel, with_p, tiles[0], inner, outer, (*shared, dk, dv), steps, scale)
    inner, outer = ((x.k_row, x.v_row), (x.k_col,)), (x.q_row, x.do_row)
    _run(queries_kernel, constants, tiles[1], inner, outer, (*shared, dq, peaks), steps, scale)
    return dq, dk, dv, lse.new_zeros(()) if peaks is None else peaks.amax()
