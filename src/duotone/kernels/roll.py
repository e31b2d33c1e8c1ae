"""The end of a step of delayed scaling, `duotone.state.history.rolled`, for all slots of a state in one kernel."""

import functools

import torch
import triton.language as tl
from torch import Tensor

from duotone.kernels.launch import Launch, kernel


@kernel
def roll_kernel(history, scale, before, largest, L, N, RECENT: tl.constexpr, T: tl.constexpr):
    """One slot a program: its column of (L, N) moves up, its live amax becomes the newest entry, its scale follows."""
    slot = tl.program_id(0)
    i = tl.arange(0, T)
    column = history + slot
    live = tl.load(column)
    old = tl.load(scale + slot)
    later = tl.load(column + (i + 1) * N, mask=i + 1 < L, other=0.0)
    amax = live
    if not RECENT:
        worst = tl.max(tl.where(later == later, 0, 1), axis=0)  # a NaN from outside keeps the scale
        amax = tl.where(worst > 0, float("nan"), tl.maximum(tl.max(later, axis=0), live))
    made = tl.div_rn(tl.load(largest + slot), amax)
    made = tl.minimum(made, 3.4028234663852886e38)
    made = tl.where((amax > 0.0) & (amax < float("inf")), made, old)
    moves = live > 0.0
    tl.store(before + slot, old)
    tl.store(scale + slot, tl.where(moves, made, old))
    tl.debug_barrier()  # every entry is read before any is written
    moved = tl.where(i == 0, 0.0, tl.where(i == L - 1, live, later))
    tl.store(column + i * N, moved, mask=(i < L) & moves)


def roll(history: Tensor, scale: Tensor, largest: Tensor, recent: bool) -> Tensor:
    """Roll fp32 (L, n) and the scales (n,) in place; `largest` (n,) is MAX 2^-margin. The scales before."""
    length, slots = history.shape
    before = torch.empty_like(scale)
    _launch(recent, 1 << (length - 1).bit_length())(slots, (history, scale, before, largest), (length, slots))
    return before


@functools.cache
def _launch(recent: bool, length: int) -> Launch:
    return roll_kernel.bind({"RECENT": recent, "T": length})
