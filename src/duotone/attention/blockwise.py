"""Attention in blocks of keys, in plain torch: these functions define the bits of its seven products.

    S  = Q K^T         forward and backward
    O  = P V           P = exp(S - m) of the blocks so far; earlier sums are rescaled when m rises
    dV = P^T dO        P = exp(S - lse)
    dP = dO V^T
    dQ = dS K          dS = P * (dP - D), D = rowsum(dO * O)
    dK = dS^T Q

Heads are (batch, groups, heads of a group, tokens, width), and keys have one head in each group. Everything is fp32.
Blocks go from the last keys to the first. Many queries put most of their probability on the first tokens. As the last
block these rescale complete sums, and do not push later probabilities below what a format can hold.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from duotone.attention.head_planes import TILE, TileOperand
from duotone.attention.masks import seen_by
from duotone.formats import philox

FIRST_RANDOM = 16
"""The first random stream of the blocks. Lower numbers belong to the operands."""


@dataclass(frozen=True)
class Blocks:
    """One call: how it masks, scales and drops.

    `seen` is bool and broadcasts to the scores, or int32 `spans`; None is all keys, or the keys up to a query's own
    position if `causal`. `like` is the dtype of high precision. Dropout and stochastic rounding draw from `seed`.
    """

    scale: float
    causal: bool
    dropout: float
    seen: Tensor | None
    seed: Tensor | None
    like: torch.dtype

    def ranges(self, queries: int, keys: int) -> Iterator[tuple[int, slice, slice]]:
        """Number, queries and keys of each block, the last keys first. Queries start at the first that sees one."""
        for start in reversed(range(0, keys, TILE)):
            first = start if self.causal and self.seen is None else 0
            if first < queries:
                yield start // TILE, slice(first, queries), slice(start, min(start + TILE, keys))

    def scores(self, q: Tensor, k: Tensor, rows: slice, cols: slice) -> Tensor:
        """The scaled scores of a block, -inf for keys that are not seen."""
        scores = q[..., rows, :] @ k[..., cols, :].mT * self.scale
        if self.seen is not None and self.seen.dtype is torch.int32:
            return scores.masked_fill(~seen_by(self.seen, rows, cols).unsqueeze(2), -torch.inf)
        if self.seen is not None:
            seen = self.seen if self.seen.shape[-2] == 1 else self.seen[..., rows, :]
            return scores.masked_fill(~(seen if seen.shape[-1] == 1 else seen[..., cols]), -torch.inf)
        if not self.causal:
            return scores
        keys = torch.arange(cols.start, cols.stop, device=q.device)
        queries = torch.arange(rows.start, rows.stop, device=q.device)
        return scores.masked_fill(keys > queries[:, None], -torch.inf)

    def keep(self, like: Tensor, block: int) -> Tensor | None:
        """fp32: 1 for the probabilities of a block that dropout keeps, 0 for the others. None without dropout."""
        if not self.dropout:
            return None
        assert self.seed is not None
        rows, cols = like.numel() // like.shape[-1], like.shape[-1]
        high, low = (philox.random_bytes(self.seed + FIRST_RANDOM + block, rows, cols, plane) for plane in (2, 3))
        drawn = high.to(torch.int32) * 256 + low
        return (drawn >= round(self.dropout * 65536)).to(like.dtype).view_as(like)

    def block_seed(self, block: int) -> Tensor | None:
        """The seed, int64 (1,), with which a block of queries rounds stochastically. None without a seed."""
        return None if self.seed is None else self.seed + FIRST_RANDOM + block


def attend(
    q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, p: TileOperand, p_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The output (*lead, queries, width of v), and log(sum(exp(S))) (*lead, queries, 1).

    Both are 0 for queries that see no key.
    """
    queries, keys = q.shape[-2], k.shape[-2]
    peak = q.new_full((*q.shape[:-1], 1), -torch.inf)
    total, out = torch.zeros_like(peak), q.new_zeros((*q.shape[:-1], v.shape[-1]))
    for block, rows, cols in blocks.ranges(queries, keys):
        scores = blocks.scores(q, k, rows, cols)
        before = peak[..., rows, :]
        now = torch.maximum(before, scores.amax(-1, keepdim=True))
        base = now.masked_fill(now == -torch.inf, 0)
        rescale, weights = (before - base).exp(), (scores - base).exp()
        total[..., rows, :] = total[..., rows, :] * rescale + weights.sum(-1, keepdim=True)
        operand = p.rounded(weights, "rowwise", blocks.like, p_scale, blocks.block_seed(block))
        mask = blocks.keep(weights, block)
        operand = operand if mask is None else operand * mask
        out[..., rows, :] = out[..., rows, :] * rescale + operand @ v[..., cols, :]
        peak[..., rows, :] = now
    empty = total == 0
    out = (out / (total * (1 - blocks.dropout))).masked_fill(empty, 0)
    return out, (peak + total.log()).masked_fill(empty, 0)


@dataclass(frozen=True)
class BackwardOperands:
    """The values that the products of backward multiply, fp32: heads over their width, and over their tokens."""

    q_row: Tensor
    q_col: Tensor
    k_row: Tensor
    k_col: Tensor
    v_row: Tensor
    do_row: Tensor
    do_col: Tensor


Tile = tuple[int, slice, slice, Tensor, Tensor | None, Tensor]
"""A block in backward: its number, queries, keys, probabilities, those that dropout keeps, gradient of its scores."""


def tiles(x: BackwardOperands, out: Tensor, lse: Tensor, blocks: Blocks) -> Iterator[Tile]:
    """The blocks of backward."""
    delta = (x.do_row * out).sum(-1, keepdim=True)
    for block, rows, cols in blocks.ranges(x.q_row.shape[-2], x.k_row.shape[-2]):
        weights = (blocks.scores(x.q_row, x.k_row, rows, cols) - lse[..., rows, :]).exp()
        dp, mask = x.do_row[..., rows, :] @ x.v_row[..., cols, :].mT, blocks.keep(weights, block)
        if mask is not None:
            mask = mask / (1 - blocks.dropout)
            dp = dp * mask
        yield block, rows, cols, weights, mask, weights * (dp - delta[..., rows, :])


def differentiate(
    x: BackwardOperands,
    out: Tensor,
    lse: Tensor,
    blocks: Blocks,
    p: TileOperand,
    ds: TileOperand,
    p_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, from the operands of the products, the output and the results of `attend`."""
    if ds.is_new and x.q_row.numel() and x.k_row.numel():
        ds.start(torch.stack([gradient.abs().amax() for *_, gradient in tiles(x, out, lse, blocks)]))
    dq, dk, dv = torch.zeros_like(x.q_row), torch.zeros_like(x.k_row), torch.zeros_like(x.v_row)
    for block, rows, cols, weights, mask, gradient in tiles(x, out, lse, blocks):
        seed = blocks.block_seed(block)
        operand = p.rounded(weights.mT, "columnwise", blocks.like, p_scale, seed)
        operand = operand if mask is None else operand * mask.mT
        dv[..., cols, :] = (operand @ x.do_col[..., rows, :]).sum(2, keepdim=True)
        row, col = ds.both(gradient, blocks.like, seed)
        dq[..., rows, :] += row @ x.k_col[..., cols, :]
        dk[..., cols, :] = (col @ x.q_col[..., rows, :]).sum(2, keepdim=True)
    return dq * blocks.scale, dk * blocks.scale, dv
