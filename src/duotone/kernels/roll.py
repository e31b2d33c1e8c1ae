"""The end of a step of delayed scaling, `duotone.state.history.rolled`, for all slots of many states in one kernel."""

import functools

import torch
import triton.language as tl
from torch import Tensor

from duotone.kernels.launch import Launch, kernel


@kernel
def roll_kernel(table, largest, before, L, SPIKE, RECENT: tl.constexpr, SKIP: tl.constexpr, T: tl.constexpr):
    """A program has one slot. Its column of (L, N) moves up, its live amax becomes the newest entry, its scale follows.

    With SKIP, a live amax that is not finite does not enter, and counts in row 0 of the events (2, N). A live amax
    above SPIKE times the largest other entry enters as that product, and counts in row 1. SPIKE 0 clamps nothing.
    """
    slot = tl.program_id(0)
    column = tl.load(table + 4 * slot).to(tl.pointer_type(tl.float32))
    scale = tl.load(table + 4 * slot + 1).to(tl.pointer_type(tl.float32))
    events = tl.load(table + 4 * slot + 2).to(tl.pointer_type(tl.int32))
    N = tl.load(table + 4 * slot + 3)
    i = tl.arange(0, T)
    live = tl.load(column)
    old = tl.load(scale)
    later = tl.load(column + (i + 1) * N, mask=i + 1 < L, other=0.0)
    if SKIP:
        finite = (live == live) & (live < float("inf"))
        tl.store(events, tl.load(events) + tl.where(finite, 0, 1))
        live = tl.where(finite, live, 0.0)
        later = tl.where((later == later) & (later < float("inf")), later, 0.0)
    most = tl.max(tl.where(later == later, later, 0.0), axis=0)  # a NaN from outside does not count
    limit = most * SPIKE
    spike = (limit > 0.0) & (live > limit)
    live = tl.where(spike, limit, live)
    tl.store(events + N, tl.load(events + N) + tl.where(spike, 1, 0))
    amax = live
    if not RECENT:
        amax = tl.where(live == live, tl.maximum(most, live), most)
    result = tl.div_rn(tl.load(largest + slot), amax)
    result = tl.minimum(result, 3.4028234663852886e38)
    result = tl.where((amax > 0.0) & (amax < float("inf")), result, old)
    moves = tl.where(live == live, live > 0.0, True)
    tl.store(before + slot, old)
    tl.store(scale, tl.where(moves, result, old))
    tl.debug_barrier()  # every entry is read before any is written
    tl.store(column, 0.0)
    tl.store(column + i * N, tl.where(i == L - 1, live, later), mask=(i > 0) & (i < L) & moves)


def addresses(history: Tensor, scale: Tensor, events: Tensor) -> Tensor:
    """int64 (n, 4), on their device: for each slot the addresses of its column, its scale and its events, and n.

    `history` fp32 (L, n), `scale` fp32 (n,), `events` int32 (2, n), contiguous.
    """
    slots = scale.numel()
    offset = torch.arange(slots, device=scale.device) * 4  # a copy from the host would wait for the device
    starts = [offset + buffer.data_ptr() for buffer in (history, scale, events)]
    return torch.stack([*starts, torch.full_like(offset, slots)], 1)


def roll(table: Tensor, largest: Tensor, length: int, recent: bool, skip: bool, spike: float) -> Tensor:
    """Roll slots in place: `table` holds `addresses` of histories of one length, `largest` (n,) is MAX 2^-margin.

    Returns the scales before, fp32 (n,).
    """
    before = torch.empty_like(largest)
    tensors = (table, largest, before)
    _launch(recent, skip, 1 << (length - 1).bit_length())(largest.numel(), tensors, (length,), (float(spike),))
    return before


@functools.cache
def _launch(recent: bool, skip: bool, length: int) -> Launch:
    return roll_kernel.bind({"RECENT": recent, "SKIP": skip, "T": length})
