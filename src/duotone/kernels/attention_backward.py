"""Attention, backward: the gradients of query, key and value, each product in FP8 or in high precision.

    S  = Q K^T     reads rowwise planes of query and key
    dP = dO V^T    reads rowwise planes of the gradient and value
    dV = P^T dO    reads the columnwise plane of the gradient in FP8, else its rows
    dQ = dS K      reads the columnwise plane of the key in FP8, else its rows
    dK = dS^T Q    reads the columnwise plane of the query in FP8, else its rows

Tensor cores read FP8 along the sum, so a sum over tokens needs a columnwise plane. P and dS exist in registers alone.
One launch computes the gradients of keys and values, another one that of queries. No sum is atomic, so bits repeat.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from duotone.kernels.attention import DTYPES, IMPRECISE, LOG2E, P_SCALE, Options
from duotone.kernels.elements import ELEMENTS
from duotone.kernels.launch import Launch, kernel

DV, DK, DQ = (tl.constexpr(i) for i in range(3))
"""What a launch computes."""

Tiles = tuple[int, int, int, int]
_USUAL: Tiles = (128, 64, 8, 3)
TILES = {True: ((128, 128, 8, 3), _USUAL, _USUAL), False: (_USUAL,) * 3}
"""Of dV, dK and dQ, by whether dV is in FP8, which leaves registers for larger steps: tokens whose gradients a program
computes, tokens of a step of its loop, warps, and stages of loads.

The fastest of four on an H200. dK spills 40 bytes there, and is 1.17 times as fast as with steps that do not spill.
"""

P_SCALES = {None: None, torch.float8_e4m3fn: P_SCALE, torch.float8_e5m2: 2.0**15}
"""Of probabilities without a delayed scale, by their format."""

DELTA_ROWS = 32


@triton.jit
def _value(scale):
    return 1.0 if scale is None else tl.load(scale)


@triton.jit
def _over_tokens(weights, scale, plane, steps, start, tokens, T, d, acc, FMT: tl.constexpr, MASKED: tl.constexpr):
    """acc + weights @ plane, a sum over tokens. Weights are rounded to FMT if it is FP8, and keep `scale`.

    Without a scale each row of weights has that of its largest element, which the sum undoes.
    """
    FP8: tl.constexpr = plane.dtype.element_ty.is_fp8()
    n = tl.arange(0, tokens.shape[0])
    at = plane + tl.cast(start, tl.int64) * steps[0] + (n[:, None] * steps[0] + d[None, :] * steps[1])
    other = tl.load(at, mask=tokens[:, None] < T, other=0.0) if MASKED else tl.load(at)
    BY_ROW: tl.constexpr = FMT is not None and scale is None
    by = 1.0
    if BY_ROW:
        LIMIT: tl.constexpr = 448.0 if FMT == tl.float8e4nv else 57344.0
        largest = tl.max(tl.abs(weights), 1)[:, None]
        by = tl.where(largest > 0.0, LIMIT / largest, 1.0)
    elif FMT is not None:
        by = scale
    rounded = weights if FMT is None else (weights * by).to(FMT)
    operand = rounded if FP8 else rounded.to(other.dtype)
    if BY_ROW:
        acc += tl.dot(operand, other) / by
    else:
        # Hopper adds up FP8 products with fewer bits: each step has a sum apart.
        acc = tl.dot(operand, other, acc, max_num_imprecise_acc=other.shape[0] if FP8 else None)
    return acc


@triton.jit
def _row(at, tokens, T, MASKED: tl.constexpr):
    return (tl.load(at + tokens, mask=tokens < T, other=0.0) if MASKED else tl.load(at + tokens))[None, :]


@triton.jit
def _tile(
    state, outer_tiles, others, steps, start, outer, T, T_OUTER, d, lse, delta, factor, p_factor, scale,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, FEW: tl.constexpr, FMT: tl.constexpr,
    BN: tl.constexpr, AMAX: tl.constexpr,
):  # fmt: skip
    """The sum and the largest |dS| after more tokens. A tile is (outer tokens, tokens): one has queries, one keys."""
    acc, peak = state
    step, sum_steps = steps
    n = tl.arange(0, BN)
    tokens, place = start + n, tl.cast(start, tl.int64) * step + (n[None, :] * step + d[:, None])
    inside = tokens[None, :] < T
    at_s = tl.load(others[0] + place, mask=inside, other=0.0) if MASKED else tl.load(others[0] + place)
    logs = lse if KIND == DQ else _row(lse, tokens, T, MASKED)
    weights = tl.exp2(tl.dot(outer_tiles[0], at_s, max_num_imprecise_acc=FEW) * factor - logs)
    if MASKED:
        seen = inside & (outer[:, None] < T_OUTER)
        if CAUSAL:
            seen = seen & ((tokens[None, :] <= outer[:, None]) if KIND == DQ else (outer[:, None] <= tokens[None, :]))
        weights = tl.where(seen, weights, 0.0)
    if KIND != DV:
        at_p = tl.load(others[1] + place, mask=inside, other=0.0) if MASKED else tl.load(others[1] + place)
        deltas = delta if KIND == DQ else _row(delta, tokens, T, MASKED)
        weights = weights * (tl.dot(outer_tiles[1], at_p, max_num_imprecise_acc=FEW) * p_factor - deltas)
    if AMAX:
        peak = tl.maximum(peak, tl.max(tl.abs(weights), 1))
    acc = _over_tokens(weights, scale, others[2], sum_steps, start, tokens, T, d, acc, FMT, MASKED)
    return acc, peak


@triton.jit
def _steps(block, T, BM: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr, CAUSAL: tl.constexpr):
    """Steps of inner tokens: all tokens are seen in [edge, full), and some in [first, edge) and [full, last)."""
    first, edge, full, last = 0, 0, T // BN, tl.cdiv(T, BN)
    if CAUSAL:
        if KIND == DQ:
            full, last = tl.minimum(T, block * BM + 1) // BN, tl.cdiv(tl.minimum(T, block * BM + BM), BN)
        else:
            first = tl.minimum(block * BM // BN, full)
            edge = tl.minimum(tl.cdiv(block * BM + BM - 1, BN), full)
    return first, edge, full, last


@kernel
def attend_backward_kernel(
    outer_s, outer_p, inner_s, inner_p, inner_sum, outer_s_scale, outer_p_scale, s_scale, p_scale, sum_scale,
    weights_scale, lse, delta, grad, peaks, T_OUTER, T, B, scale,
    OUTER: tl.constexpr, INNER: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, FEW: tl.constexpr, FMT: tl.constexpr, P: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """A program computes the gradients of BM outer tokens of one of OUTER heads, of keys or of queries.

    Planes that products over the width read, and gradients, are (batch, tokens, heads, D). An FP8 plane that is read
    over tokens is (heads, D, batch, tokens). lse, in units of log2, and delta are (batch, heads of queries, queries).
    `peaks` are the largest |dS| of each program. The longest programs of causal attention come first.
    """
    blocks = tl.cdiv(T_OUTER, BM)
    across = tl.num_programs(0) // blocks
    block, head = tl.program_id(0) // across, tl.program_id(0) % across
    block = blocks - 1 - block if KIND == DQ else block
    b, h = (head // OUTER).to(tl.int64), head % OUTER
    outer, d = block * BM + tl.arange(0, BM), tl.arange(0, D)
    place, inside = ((b * T_OUTER + outer) * OUTER + h)[:, None] * D + d[None, :], outer[:, None] < T_OUTER
    tile_s = tl.load(outer_s + place, mask=inside, other=0.0)
    outer_tiles = tile_s, tile_s if KIND == DV else tl.load(outer_p + place, mask=inside, other=0.0)
    factor = _value(outer_s_scale) * _value(s_scale) * scale * LOG2E
    p_factor = _value(outer_p_scale) * _value(p_scale)
    of_w = tl.load(weights_scale) if weights_scale is not None else P if KIND == DV else None
    COLUMNS: tl.constexpr = inner_sum.dtype.element_ty.is_fp8()
    steps = INNER * D, (1, B * T) if COLUMNS else (INNER * D, 1)
    first, edge, full, last = _steps(block, T, BM, BN, KIND, CAUSAL)
    state = tl.zeros([BM, D], tl.float32), tl.zeros([BM], tl.float32)
    HEADS: tl.constexpr = 1 if KIND == DQ else INNER // OUTER
    for r in range(HEADS):
        other = h // (OUTER // INNER) if KIND == DQ else h * HEADS + r
        rows, columns = (b * T * INNER + other) * D, other.to(tl.int64) * D * B * T + b * T
        others = inner_s + rows, inner_p + rows, inner_sum + (columns if COLUMNS else rows)
        if KIND == DQ:
            at = (b * OUTER + h) * T_OUTER + outer
            logs = tl.load(lse + at, mask=outer < T_OUTER, other=0.0)[:, None]
            deltas = tl.load(delta + at, mask=outer < T_OUTER, other=0.0)[:, None]
        else:
            logs, deltas = lse + (b * INNER + other) * T, delta + (b * INNER + other) * T
        for i in tl.range(0, edge - first + last - full, num_stages=1):
            n = first + i
            start = tl.where(n < edge, n, n - edge + full) * BN
            state = _tile(
                state, outer_tiles, others, steps, start, outer, T, T_OUTER, d, logs, deltas, factor, p_factor, of_w,
                KIND, CAUSAL, True, FEW, FMT, BN, peaks is not None,
            )  # fmt: skip
        for n in range(edge, full):
            state = _tile(
                state, outer_tiles, others, steps, n * BN, outer, T, T_OUTER, d, logs, deltas, factor, p_factor, of_w,
                KIND, CAUSAL, False, FEW, FMT, BN, peaks is not None,
            )  # fmt: skip
    acc, peak = state
    by = _value(sum_scale) * (1.0 if KIND == DV else scale)
    if of_w is not None:
        by = by / of_w
    tl.store(grad + place, (acc * by).to(DTYPE), mask=inside)
    if peaks is not None:
        tl.store(peaks + tl.program_id(0), tl.max(peak, 0))


@kernel
def delta_kernel(do, out, do_scale, out_scale, delta, ROWS, T, H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr):
    """rowsum(dO * O) of BM rows (batch, tokens, H, D), as (batch, H, tokens)."""
    rows, d = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM), tl.arange(0, D)
    at, inside = rows[:, None] * D + d[None, :], rows[:, None] < ROWS
    product = tl.load(do + at, mask=inside, other=0.0).to(tl.float32)
    product *= tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    b, t, h = rows // (H * T), rows // H % T, rows % H
    total = tl.sum(product, 1) * (_value(do_scale) * _value(out_scale))
    tl.store(delta + (b * H + h) * T + t, total, mask=rows < ROWS)


class Operand(NamedTuple):
    """Values of a plane, and what they are multiplied by, fp32 (1,) or None."""

    values: Tensor
    scale: Tensor | None


class BackwardOperands(NamedTuple):
    """What the products of backward read: planes for sums over the width of heads, and for sums over their tokens.

    FP8 of a sum over tokens is (heads, width, batch, tokens); all else is (batch, tokens, heads, width).
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


@functools.cache
def _launch(constants: tuple[tuple[str, object], ...], tiles: Tiles, variant: tuple[object, ...]) -> Launch:
    """`variant`: dtypes, and which tensors are None. A launch has the same ones in all of its calls."""
    return attend_backward_kernel.bind(dict(constants), *tiles[2:])


def _gradient(
    kind: int,
    x: BackwardOperands,
    weights: Weights,
    logs: tuple[Tensor, Tensor],
    options: Options,
    grad: Tensor,
    peaks: Tensor | None,
    tiles: Tiles,
) -> None:
    """Launch the kernel for one of the gradients; `logs` are the log-sum-exp in units of log2 and D."""
    scale, causal, fast, dtype = options
    operands = {
        DV.value: (x.k_row, x.v_row, x.q_row, x.do_row, x.do_col),
        DK.value: (x.k_row, x.v_row, x.q_row, x.do_row, x.q_col),
        DQ.value: (x.q_row, x.do_row, x.k_row, x.v_row, x.k_col),
    }[kind]
    fmt, fmt_scale = (weights.p, weights.p_scale) if kind == DV.value else (weights.ds, weights.ds_scale)
    (batch, tokens, heads, width), (others, count) = operands[0].values.shape, operands[2].values.shape[1:3]
    constants = {
        "OUTER": heads, "INNER": count, "D": width, "BM": tiles[0], "BN": tiles[1], "KIND": kind, "CAUSAL": causal,
        "FEW": None if fast else IMPRECISE, "FMT": fmt and ELEMENTS[fmt], "P": P_SCALES[fmt], "DTYPE": DTYPES[dtype],
    }  # fmt: skip
    values, scales = zip(*operands, strict=True)
    tensors = (*values, *scales, fmt_scale, *logs, grad, peaks)
    variant = tuple(None if tensor is None else tensor.dtype for tensor in tensors)
    launch = _launch(tuple(constants.items()), tiles, variant)
    launch(-(-tokens // tiles[0]) * batch * heads, tensors, (tokens, others, batch), (scale,))


def deltas(do: Operand, out: Operand) -> Tensor:
    """rowsum(dO * O), fp32 (batch, heads, tokens)."""
    batch, tokens, heads, width = do.values.shape
    delta = torch.empty((batch, heads, tokens), dtype=torch.float32, device=do.values.device)
    variant = do.values.dtype, out.values.dtype, do.scale is None, out.scale is None
    launch = _delta_launch(heads, width, variant)
    rows = batch * tokens * heads
    launch(-(-rows // DELTA_ROWS), (do.values, out.values, do.scale, out.scale, delta), (rows, tokens))
    return delta


@functools.cache
def _delta_launch(heads: int, width: int, variant: tuple[object, ...]) -> Launch:
    return delta_kernel.bind({"H": heads, "D": width, "BM": DELTA_ROWS})


def differentiate(
    x: BackwardOperands,
    weights: Weights,
    lse: Tensor,
    options: Options,
    tiles: tuple[Tiles, Tiles, Tiles] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key and value (batch, tokens, heads, width), and the amax of dS or 0.

    `lse` is fp32 (batch, heads, queries). The amax is that of a dS with a delayed scale.
    """
    dv, dk, dq = (torch.empty_like(each.values, dtype=options[-1]) for each in (x.v_row, x.k_row, x.q_row))
    tiles = tiles or TILES[x.do_col.values.dtype in ELEMENTS]
    logs = lse * LOG2E.value, deltas(x.do_row, x.out)
    peaks = (
        lse.new_empty(-(-dq.shape[1] // tiles[DQ.value][0]) * dq.shape[0] * dq.shape[2])
        if weights.ds_scale is not None
        else None
    )
    for kind, grad in enumerate((dv, dk, dq)):
        _gradient(kind, x, weights, logs, options, grad, peaks if kind == DQ.value else None, tiles[kind])
    return dq, dk, dv, lse.new_zeros(()) if peaks is None else peaks.amax()
