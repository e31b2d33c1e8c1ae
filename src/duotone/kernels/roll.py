"""The end of a step of delayed scaling, `duotone.state.history.rolled`, for all slots of a state in one kernel."""

import functools

import torch
import triton.language as tl
from torch import Tensor

from duotone.kernels.launch import Launch, kernel


@kernel
def roll_kernel(
    history, scale, before, largest, events, L, N, SPIKE, RECENT: tl.constexpr, SKIP: tl.constexpr, T: tl.constexpr
):
    """One slot a program: its column of (L, N) moves up, its live amax becomes the newest entry, its scale follows.

    SKIP: a live amax that is not finite does not enter, and counts in row 0 of `events` (2, N). One above SPIKE times
    the largest of the rest enters as this, and counts in row 1; SPIKE 0 lets it be.
    """
    slot = tl.program_id(0)
    i = tl.arange(0, T)
    column = history + slot
    live = tl.load(column)
    old = tl.load(scale + slot)
    later = tl.load(column + (i + 1) * N, mask=i + 1 < L, other=0.0)
    if SKIP:
        finite = (live == live) & (live < float("inf"))
        tl.store(events + slot, tl.load(events + slot) + tl.where(finite, 0, 1))
        live = tl.where(finite, live, 0.0)
        later = tl.where((later == later) & (later < float("inf")), later, 0.0)
    most = tl.max(tl.where(later == later, later, 0.0), axis=0)  # a NaN from outside does not count
    limit = most * SPIKE
    spike = (limit > 0.0) & (live > limit)
    live = tl.where(spike, limit, live)
    tl.store(events + N + slot, tl.load(events + N + slot) + tl.where(spike, 1, 0))
    amax = live
    if not RECENT:
        amax = tl.where(live == live, tl.maximum(most, live), most)
    result = tl.div_rn(tl.load(largest + slot), amax)
    result = tl.minimum(result, 3.4028234663852886e38)
    result = tl.where((amax > 0.0) & (amax < float("inf")), result, old)
    moves = tl.where(live == live, live > 0.0, True)
    tl.store(before + slot, old)
    tl.store(scale + slot, tl.where(moves, result, old))
    tl.debug_barrier()  # every entry is read before any is written
    tl.store(column, 0.0)
    tl.store(column + i * N, tl.where(i == L - 1, live, later), mask=(i > 0) & (i < L) & moves)


def roll(
    history: Tensor, scale: Tensor, events: Tensor, largest: Tensor, recent: bool, skip: bool, spike: float
) -> Tensor:
    """Roll fp32 (L, n) and the scales (n,) in place; `largest` (n,) is MAX 2^-margin. The scales before."""
    length, slots = history.shape
    before = torch.empty_like(scale)
    tensors = (history, scale, before, largest, events)
    _launch(recent, skip, 1 << (length - 1).bit_length())(slots, tensors, (length, slots), (float(spike),))
    return before


@functools.cache
def _launch(recent: bool, skip: bool, length: int) -> Launch:
    return roll_kernel.bind({"RECENT": recent, "SKIP": skip, "T": length})
