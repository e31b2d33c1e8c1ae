"""Largest magnitudes of contiguous matrices (M, K): of all, or of rows and columns in one read. NaN counts as 0.

`tensor_census` counts NaN and infinities in the same read.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from duotone.allocate import allocator
from duotone.kernels.launch import kernel

PARTIALS = 512
"""The most programs of `tensor_amax`. Each leaves one partial amax, and the reader takes their maximum."""
CHUNK, WALKS = 8192, 64
CENSUS_PROGRAMS, CENSUS_CHUNK = 1024, 4096
LINES, ACROSS, WARPS = 16, 256, 2
ALIGNED = 4
"""fp32 values between addresses that kernels may take as aligned."""
SPANS = (512, 256, 128, 64)
"""Rows that one program of `line_amax` walks down: the most that leave LEAST_PROGRAMS programs, else the fewest."""
LEAST_PROGRAMS = 1024


@triton.jit
def nan_to_zero(value):
    """`value`, or 0 for NaN: tl.max ignores NaN only if another value is present."""
    return tl.where(value == value, value, 0.0)


@triton.jit
def record(live, below):
    """Raise `live` to the amax of a tile. Most tiles read a larger one and do not write."""
    largest = nan_to_zero(tl.max(tl.max(below, axis=1), axis=0)).to(tl.int32, bitcast=True)
    tl.atomic_max(live, largest, mask=largest > tl.load(live), sem="relaxed")


@triton.jit
def larger(a, b, NAN: tl.constexpr):
    """The maximum. NaN is dropped; with NAN it stays."""
    if NAN:
        result = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        result = tl.maximum(a, b)
    return result


@triton.jit
def amax_along(magnitude, axis: tl.constexpr, NAN: tl.constexpr):
    """The largest magnitudes along an axis. NaN is dropped; with NAN it counts as infinite.

    Magnitudes order like their bits, and NaN is above infinity.
    """
    if NAN:
        bits = tl.max(magnitude.to(tl.int32, bitcast=True), axis=axis)
        result = tl.minimum(bits, 0x7F800000).to(tl.float32, bitcast=True)
    else:
        result = tl.max(magnitude, axis=axis)
    return result


@kernel
def tensor_amax_kernel(x, partial, N, CHUNK: tl.constexpr, NAN: tl.constexpr):
    """Each program walks over every P-th chunk of N elements and leaves one amax. NaN counts as 0, or with NAN as
    infinite."""
    i = tl.arange(0, CHUNK)
    largest = tl.zeros([CHUNK], tl.float32)
    step = tl.num_programs(0).to(tl.int64) * CHUNK
    for start in range(tl.program_id(0).to(tl.int64) * CHUNK, N, step):
        value = tl.load(x + start + i, mask=start + i < N, other=0.0).to(tl.float32)
        largest = larger(largest, tl.abs(value), NAN)
    tl.store(partial + tl.program_id(0), amax_along(largest, 0, NAN))


@kernel
def amaxes_kernel(first, table, largest, WALKS: tl.constexpr, CHUNK: tl.constexpr):
    """The amax of each matrix of `table` (n, 2), its address and its elements, into int32 bits that start at 0.

    WALKS programs share a matrix. All have the dtype of `first`, which is not read. NaN counts as 0.
    """
    matrix, part = tl.program_id(0) // WALKS, (tl.program_id(0) % WALKS).to(tl.int64)
    x = tl.multiple_of(tl.load(table + 2 * matrix).to(first.dtype), 16)
    N = tl.load(table + 2 * matrix + 1)
    i = tl.arange(0, CHUNK)
    below = tl.zeros([CHUNK], tl.float32)
    whole = N // CHUNK
    for chunk in range(part, whole, WALKS):  # without a mask, threads load 16 bytes at once
        below = larger(below, tl.abs(tl.load(x + chunk * CHUNK + i).to(tl.float32)), False)
    if part == whole % WALKS:
        start = whole * CHUNK
        rest = tl.load(x + start + i, mask=start + i < N, other=0.0).to(tl.float32)
        below = larger(below, tl.abs(rest), False)
    bits = nan_to_zero(tl.max(below, axis=0)).to(tl.int32, bitcast=True)
    tl.atomic_max(largest + matrix, bits, sem="relaxed")


@kernel
def tensor_census_kernel(x, counts, N, CHUNK: tl.constexpr):
    """Each program walks over every P-th chunk of N elements and adds to the three numbers of `tensor_census`."""
    i = tl.arange(0, CHUNK)
    largest = tl.zeros([CHUNK], tl.float32)
    nan, infinite = tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.int32)
    step = tl.num_programs(0).to(tl.int64) * CHUNK
    for start in range(tl.program_id(0).to(tl.int64) * CHUNK, N, step):
        value = tl.abs(tl.load(x + start + i, mask=start + i < N, other=0.0).to(tl.float32))
        is_nan, is_infinite = value != value, value == float("inf")
        largest = tl.maximum(largest, tl.where(is_nan | is_infinite, 0.0, value))
        nan += is_nan.to(tl.int32)
        infinite += is_infinite.to(tl.int32)
    bits = tl.max(largest, axis=0).to(tl.int32, bitcast=True).to(tl.int64)
    tl.atomic_max(counts, bits, sem="relaxed")
    nans, infinities = tl.sum(nan, axis=0).to(tl.int64), tl.sum(infinite, axis=0).to(tl.int64)
    tl.atomic_add(counts + 1, nans, mask=nans > 0, sem="relaxed")
    tl.atomic_add(counts + 2, infinities, mask=infinities > 0, sem="relaxed")


@kernel
def line_amax_kernel(x, rows, cols, M, K, TM: tl.constexpr, TK: tl.constexpr, SPAN: tl.constexpr, NAN: tl.constexpr):
    """amax of rows and of columns into int32 bits that start at 0. NaN counts as 0; with NAN as infinite.

    A program walks down SPAN rows; columns are reduced once, at its end, and a row lies within one warp.
    """
    across = tl.cdiv(K, TK)
    pm, pk = tl.program_id(0) // across, tl.program_id(0) % across
    im, k = tl.arange(0, TM), pk * TK + tl.arange(0, TK)
    start = (pm * SPAN).to(tl.int64) * K
    below = tl.zeros([TM, TK], tl.float32)
    for j in range(0, SPAN, TM):
        m = pm * SPAN + j + im
        inside = (m[:, None] < M) & (k[None, :] < K)
        value = tl.load(x + start + ((j + im)[:, None] * K + k[None, :]), mask=inside, other=0.0)
        value = tl.abs(value.to(tl.float32))
        below = larger(below, value, NAN)
        of_rows = nan_to_zero(amax_along(value, 1, NAN))
        tl.atomic_max(rows + m, of_rows.to(tl.int32, bitcast=True), mask=m < M, sem="relaxed")
    of_cols = amax_along(below, 0, NAN).to(tl.int32, bitcast=True)
    tl.atomic_max(cols + k, of_cols, mask=k < K, sem="relaxed")


_TENSOR = {nan: tensor_amax_kernel.bind({"CHUNK": CHUNK, "NAN": nan}, warps=8) for nan in (False, True)}
_AMAXES = amaxes_kernel.bind({"WALKS": WALKS, "CHUNK": CHUNK}, warps=8)
_CENSUS = tensor_census_kernel.bind({"CHUNK": CENSUS_CHUNK}, warps=8)
_LINES = {
    (span, nan): line_amax_kernel.bind({"TM": LINES, "TK": ACROSS, "SPAN": span, "NAN": nan}, WARPS)
    for span in SPANS
    for nan in (False, True)
}


def tensor_amax(x: Tensor, nan: bool = False) -> Tensor:
    """fp32 (P,), P at most PARTIALS: partial amaxes of contiguous `x`. NaN counts as 0; with `nan` as infinite."""
    count = x.numel()
    programs = min(-(-count // CHUNK), PARTIALS)
    partial = allocator(x)((programs,), (1,), torch.float32)
    _TENSOR[nan](programs, (x, partial), (count,))
    return partial


def amaxes(matrices: Sequence[Tensor]) -> Tensor:
    """fp32 (n,): the amax of each contiguous matrix, all of one dtype. NaN counts as 0."""
    table = _table(tuple([(x.data_ptr(), x.numel()) for x in matrices]), matrices[0].device)
    bits = torch.zeros(len(matrices), dtype=torch.int32, device=table.device)
    _AMAXES(WALKS * len(matrices), (matrices[0], table, bits))
    return bits.view(torch.float32)


@functools.lru_cache(maxsize=32)
def _table(places: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """Addresses and sizes on the device. A copy to it waits, but is rare: parameters keep their addresses."""
    return torch.tensor(places, dtype=torch.int64, device=device)


def tensor_census(x: Tensor, counts: Tensor) -> None:
    """Add contiguous `x` to `counts`, int64 (3,), which starts as zeros: the bits of the largest finite magnitude as
    fp32, the number of NaN, and the number of infinities."""
    _CENSUS(min(-(-x.numel() // CENSUS_CHUNK), CENSUS_PROGRAMS), (x, counts), (x.numel(),))


def line_amax(x: Tensor, nan: bool = False) -> tuple[Tensor, Tensor]:
    """The bits, int32 (M or more,) and (K or more,), of the amaxes of the rows and of the columns of contiguous `x`;
    `nan` as of `tensor_amax`."""
    m, k = x.shape
    sizes = [-(-size // ALIGNED) * ALIGNED for size in (m, k)]
    rows, cols = torch.zeros(sum(sizes), dtype=torch.int32, device=x.device).split(sizes)
    across = -(-k // ACROSS)
    span = next((span for span in SPANS if m // span * across >= LEAST_PROGRAMS), SPANS[-1])
    _LINES[span, nan](-(-m // span) * across, (x, rows, cols), (m, k))
    return rows, cols
