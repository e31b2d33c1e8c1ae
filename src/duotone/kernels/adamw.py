"""AdamW over fp32 masters in one pass: `duotone.optim.update` in kernels, bit for bit, and the weight with it.

A step reads gradient, moments and master, and writes moments and master: 26 bytes an element under a bf16 gradient. A
bf16 weight takes 2 more bytes, and so do both planes of an FP8 weight with a delayed scale. Every operation rounds as
torch's does: no product and sum become one operation, and quotients and roots are IEEE's.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from duotone.formats import ScaleCodec
from duotone.kernels.amax import record
from duotone.kernels.elements import ELEMENTS, codes_of
from duotone.kernels.launch import Constants, Launch, kernel
from duotone.kernels.scaling import CODECS, given_scale, marked_four, stored_scale
from duotone.kernels.tiles import existing, store_turned
from duotone.kernels.values import wide

State = tuple[Tensor, Tensor, Tensor, Tensor]
"""Gradient (bf16, fp16, fp32), exp_avg (fp32, bf16), exp_avg_sq (fp32), master (fp32, bf16).

All are contiguous, and of one size.
"""

CHUNK, TILE = 1024, (64, 128, 8)
"""Elements of a program; rows, columns and warps of a program that writes planes."""
UNFUSED = {"enable_fp_fusion": False}


@triton.jit
def updated(g, m, v, p, rates):
    """Moments and master after a step; `rates` are those of `duotone.optim.update`."""
    sign, decay, first, beta2, second, step_size, correction, eps = rates
    g = g * sign
    m = m + (g - m) * first
    v = v * beta2 + (g * second) * g
    p = p * decay - tl.div_rn(m * step_size, tl.sqrt_rn(v) * correction + eps)
    return m, v, p


@triton.jit
def stepped(grad, exp_avg, exp_avg_sq, master, start, i, inside, rates):
    """The new master at start + i. It, and the new moments, are stored; `start` is 64-bit."""
    m, v, p = updated(
        wide(grad + start, i, inside),
        wide(exp_avg + start, i, inside),
        wide(exp_avg_sq + start, i, inside),
        wide(master + start, i, inside),
        rates,
    )
    p = p.to(master.dtype.element_ty)
    tl.store(exp_avg + start + i, m.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + start + i, v.to(exp_avg_sq.dtype.element_ty), mask=inside)
    tl.store(master + start + i, p, mask=inside)
    return p.to(tl.float32)


@triton.jit
def loaded(numbers):
    """The numbers of a step from fp32 (8,) on the device."""
    return (
        tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3),
        tl.load(numbers + 4), tl.load(numbers + 5), tl.load(numbers + 6), tl.load(numbers + 7),
    )  # fmt: skip


@kernel
def adamw_kernel(
    grad, exp_avg, exp_avg_sq, master, out, numbers, N,
    sign, decay, first, beta2, second, step_size, correction, eps, CHUNK: tl.constexpr,
):  # fmt: skip
    """CHUNK of N elements; `out`, unless None, gets the new master rounded to its dtype."""
    start, i = tl.program_id(0).to(tl.int64) * CHUNK, tl.arange(0, CHUNK)
    inside = start + i < N
    rates = (sign, decay, first, beta2, second, step_size, correction, eps)
    if numbers is not None:
        rates = loaded(numbers)
    p = stepped(grad, exp_avg, exp_avg_sq, master, start, i, inside, rates)
    if out is not None:
        tl.store(out + start + i, p.to(out.dtype.element_ty), mask=inside)


@functools.partial(kernel, any_alignment=("scale", "live"))
def adamw_cast_kernel(
    grad, exp_avg, exp_avg_sq, master, row_codes, row_scale, col_codes, col_scale, scale, live, numbers, M, K,
    sign, decay, first, beta2, second, step_size, correction, eps,
    ELEMENT: tl.constexpr, CODEC: tl.constexpr, MARKS: tl.constexpr, EVEN: tl.constexpr,
    TM: tl.constexpr, TK: tl.constexpr,
):  # fmt: skip
    """One tile of (M, K): the step, then the codes of the new master under `scale`.

    With MARKS, infinities become NaN.
    A plane whose buffers are None is not written. The amax of the tile goes into `live` unless that is None. As in
    `cast_kernel`, a thread holds four rows below each other.
    """
    H: tl.constexpr = TM // 4
    across = tl.cdiv(K, TK)
    pm, pk = tl.program_id(0) // across, tl.program_id(0) % across
    i, k = 4 * tl.arange(0, H)[:, None], (pk * TK + tl.arange(0, TK))[None, :]
    m, row, at = pm * TM + i, (pm * TM).to(tl.int64), i * K + k
    rates = (sign, decay, first, beta2, second, step_size, correction, eps)
    if numbers is not None:
        rates = loaded(numbers)
    encode = given_scale(tl.load(scale), CODEC)
    v0 = stepped(grad, exp_avg, exp_avg_sq, master, row * K, at, existing(m, M, k, K, EVEN), rates)
    v1 = stepped(grad, exp_avg, exp_avg_sq, master, (row + 1) * K, at, existing(m + 1, M, k, K, EVEN), rates)
    v2 = stepped(grad, exp_avg, exp_avg_sq, master, (row + 2) * K, at, existing(m + 2, M, k, K, EVEN), rates)
    v3 = stepped(grad, exp_avg, exp_avg_sq, master, (row + 3) * K, at, existing(m + 3, M, k, K, EVEN), rates)
    values = (v0, v1, v2, v3)
    if live is not None:
        highest = tl.maximum(tl.abs(values[0]), tl.abs(values[1]))
        record(live, tl.maximum(highest, tl.maximum(tl.abs(values[2]), tl.abs(values[3]))))
    values = marked_four(values, MARKS)
    if row_codes is not None:
        for j in tl.static_range(4):
            codes = codes_of(values[j] * encode, ELEMENT)
            tl.store(row_codes + (row + j) * K + at, codes, mask=existing(m + j, M, k, K, EVEN))
    if col_codes is not None:
        store_turned(values, encode, col_codes, M, pm, pk, M, K, ELEMENT, EVEN, H, TK)
    stored = stored_scale(encode, encode, 1.0, CODEC)
    if row_scale is not None:
        tl.store(row_scale, stored, mask=(pm == 0) & (pk == 0))
    if col_scale is not None:
        tl.store(col_scale, stored, mask=(pm == 0) & (pk == 0))


class Target(NamedTuple):
    """Where a step writes planes: codes, contiguous uint8 (M, K) and (K, M), and scales, fp32 (1,). Some may be None.

    `element` and `codec` are those of the format, `scale` is the encode scale, fp32 (1,), and `live` the bits of the
    amax to enlarge, int32 (1,).
    """

    shape: tuple[int, int]
    element: torch.dtype
    codec: ScaleCodec
    row_codes: Tensor | None
    row_scale: Tensor | None
    col_codes: Tensor | None
    col_scale: Tensor | None
    scale: Tensor
    live: Tensor | None
    propagate: bool = True

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors in the order in which the kernel takes them."""
        return self.row_codes, self.row_scale, self.col_codes, self.col_scale, self.scale, self.live


Numbers = tuple[float, ...] | Tensor
"""The numbers of `duotone.optim.update`, on the host or in fp32 (8,) on the device."""
NO_RATES = (0.0,) * 8


def update(state: State, numbers: Numbers, out: Tensor | None = None) -> None:
    """One step; contiguous `out`, bf16 or fp16, becomes the new master rounded."""
    count = state[0].numel()
    table, rates = _placed(numbers)
    launch = _update(None if out is None else out.dtype, state[1].dtype, state[3].dtype, table is None)
    launch(-(-count // CHUNK), (*state, out, table), (count,), rates)


def update_planes(state: State, numbers: Numbers, target: Target) -> None:
    """One step that also writes the planes of the new master."""
    m, k = target.shape
    tm, tk, _ = TILE
    table, rates = _placed(numbers)
    others = *(t is None for t in target.tensors), state[1].dtype, state[3].dtype, table is None
    launch = _update_planes(target.element, target.codec, target.propagate, not (m % tm or k % tk), others)
    launch(-(-m // tm) * -(-k // tk), (*state, *target.tensors, table), (m, k), rates)


def _placed(numbers: Numbers) -> tuple[Tensor | None, tuple[float, ...]]:
    return (numbers, NO_RATES) if isinstance(numbers, Tensor) else (None, numbers)


@functools.cache
def _update(out: torch.dtype | None, moments: torch.dtype, master: torch.dtype, on_host: bool) -> Launch:
    """A launch for each set of these dtypes, which a launch does not look at."""
    del out, moments, master, on_host
    return adamw_kernel.bind({"CHUNK": CHUNK}, options=UNFUSED)


@functools.cache
def _update_planes(
    element: torch.dtype, codec: ScaleCodec, marks: bool, even: bool, others: tuple[bool | torch.dtype, ...]
) -> Launch:
    """A launch for each set of absent tensors and of dtypes of the state, which a launch does not look at."""
    del others
    tm, tk, warps = TILE
    constants: Constants = {"ELEMENT": ELEMENTS[element], "CODEC": CODECS[codec]}
    constants |= {"MARKS": marks, "EVEN": even, "TM": tm, "TK": tk}
    return adamw_cast_kernel.bind(constants, warps if even else 2 * warps, options=UNFUSED)  # masks take registers
