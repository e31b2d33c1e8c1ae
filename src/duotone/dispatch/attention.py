"""Which kernels run attention in low precision: over FP8 codes, and a backward in high precision by torch."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.dispatch.casts import contiguous_rows, decoded
from duotone.dispatch.rule import Operand
from duotone.dispatch.target import HOPPER, Target, cuda_target
from duotone.formats import IDENTITY, Format
from duotone.formats.geometry import TENSOR
from duotone.numbered import constant_in_traces

if TYPE_CHECKING:
    from duotone.kernels.attention_backward import Operand as KernelOperand

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
WIDTHS = (64, 128, 256)
"""Widths of heads in the FP8 kernels. Codes of other heads get zeros at their end."""
FORWARD, BACKWARD = ("QK^T", "PV"), ("P^T dO", "dO V^T", "dS K", "dS^T Q")
KERNEL = "FP8 attention"
NO_DROPOUT = "the FP8 kernel has no dropout"
MEASURED = "measured"
NEVER = 1 << 40


class LeastTokens(NamedTuple):
    """FP8 is faster from so many queries on: without a mask, in forward alone and in training; under windows, sequences
    and causal padding, for which torch masks all pairs; and under other padding."""

    forward: int
    training: int
    spans: int
    padding: int

    def for_call(self, trains: bool, is_masked: bool, is_padded: bool) -> int:
        """The number for a call. `is_padded`: its mask is padding without causality."""
        unmasked = self.training if trains else self.forward
        masked = self.padding if is_padded else self.spans
        return unmasked if not is_masked or (masked >= NEVER and not trains) else masked


NO_TOKENS = LeastTokens(NEVER, NEVER, NEVER, NEVER)
# bench/results/2026-11-23-h200-attention-{tiles,masks,runs}.txt and bench/NOTES.md, casts included, next to cuDNN.
LEAST_TOKENS: dict[tuple[tuple[int, int], int], LeastTokens] = {
    (HOPPER, 128): LeastTokens(8192, 16384, 4096, 8192),
    (HOPPER, 64): LeastTokens(16384, NEVER, NEVER, NEVER),
    (HOPPER, 96): LeastTokens(16384, NEVER, NEVER, NEVER),
    (HOPPER, 256): LeastTokens(16384, 16384, NEVER, NEVER),
}
"""The measured numbers, by architecture and width of heads."""

MEASURED_HEADS = 32
"""The number of heads in these measurements. Calls with less work are bound by the host, and casts cost host time."""

SDPA = F.scaled_dot_product_attention
HALF = (torch.bfloat16, torch.float16)
CUDNN_TOKENS, CUDNN_WIDTH = 2048, 128
"""cuDNN is faster than FlashAttention-2 on Hopper from so many queries on, and the widest heads that it takes."""


class AttentionProblem(NamedTuple):
    """What decides the kernels: the formats of both operands of each product, widths of heads, dropout and target."""

    products: Mapping[str, tuple[Format, Format]]
    widths: tuple[int, int]
    dropout: float
    target: Target

    def never(self) -> str:
        """Why no kernel takes these formats on any GPU, or ""."""
        used = {fmt for pair in self.products.values() for fmt in pair if fmt != IDENTITY}
        odd = sorted(fmt.name for fmt in used if not (fmt.code_dtype in FP8 and fmt.block == TENSOR))
        if odd:
            return f"no attention kernel takes {', '.join(odd)}"
        formats = [fmt for name in FORWARD for fmt in self.products[name]]
        if any(fmt.code_dtype != torch.float8_e4m3fn for fmt in formats):
            return "the FP8 kernel multiplies E4M3 with E4M3"
        if any(self.products[name][0].is_stochastic for name in ("PV", *BACKWARD) if name != "dO V^T"):
            return "the FP8 kernel rounds P and dS to nearest"
        return ""

    def nowhere(self) -> str:
        """Why no GPU's kernel runs the products of forward, or ""."""
        if refusal := self.never():
            return refusal
        width, of_value = self.widths
        if width != of_value or width % 8 or not WIDTHS[0] <= width <= WIDTHS[-1]:
            return f"the FP8 kernel takes heads of one width from {WIDTHS[0]} to {WIDTHS[-1]}, a multiple of 8"
        return NO_DROPOUT if self.dropout else ""

    def forward_refusal(self) -> str:
        """Why the FP8 kernel does not run the products of forward, or ""."""
        if refusal := self.nowhere():
            return refusal
        width = self.widths[0]
        if width > CUDNN_WIDTH and self.target.runs_kernels and not self.target.has_large_blocks:
            return f"the FP8 kernel takes heads wider than {CUDNN_WIDTH} on Hopper or Blackwell alone (sm90, sm100)"
        return "" if self.target.runs_kernels else "the FP8 kernel needs an NVIDIA GPU with FP8, and Triton"

    def is_measured(self, min_tokens: int | str) -> bool:
        """Whether `dpa_min_tokens` of a recipe leaves the choice to measurements, which this target has."""
        return min_tokens == MEASURED and not self.never() and any(arch == self.target.arch for arch, _ in LEAST_TOKENS)

    def least_tokens(self, min_tokens: int | str) -> LeastTokens:
        """Queries below which products stay in high precision."""
        refusal = self.forward_refusal()
        if self.is_measured(min_tokens):
            return LEAST_TOKENS.get((self.target.arch, self.widths[0]), NO_TOKENS) if not refusal else NO_TOKENS
        number = min_tokens if isinstance(min_tokens, int) and not refusal else 0
        return LeastTokens(number, number, number, number)

    @property
    def native(self) -> frozenset[str]:
        """The products with two operands in FP8."""
        return frozenset(name for name, pair in self.products.items() if IDENTITY not in pair)

    @property
    def backward_kernel(self) -> str:
        """What runs the products of backward where none is refused."""
        gradients = [self.products[name][0] for name in BACKWARD] + [self.products["P^T dO"][1]]
        if any(fmt != IDENTITY for fmt in gradients):
            return KERNEL
        return "cuDNN" if self.target.arch == HOPPER else "FlashAttention-2"

    def backward_refusal(self) -> str:
        """Why no kernel runs the products of backward, or ""."""
        if refusal := self.forward_refusal():
            return refusal
        if self.products["dS K"][0] != self.products["dS^T Q"][0]:
            return "the FP8 kernel takes one format of dS"
        if self.backward_kernel == KERNEL and not self.target.has_large_blocks:
            return "the FP8 kernel of backward needs the shared memory of Hopper or Blackwell (sm90, sm100)"
        return ""


class Options(NamedTuple):
    """The `scale` of scores, whether FP8 sums may have fewer bits (`fast`), and the dtype of results."""

    scale: float
    causal: bool
    fast: bool
    dtype: torch.dtype


MASK_BLOCK = 64
"""Queries and keys of a block of a mask. A kernel skips blocks in which nothing is seen."""


def sight(seen: Tensor | None, queries: int, keys: int) -> tuple[Tensor | None, Tensor | None]:
    """A mask in the form for kernels: spans, int32 (batch or 1, 2, queries + keys), and a mask within them.

    With a mask, spans are (batch or 1, 4, queries + keys): around the blocks that are fully seen lie partly seen ones.

    `seen` are spans, or bool that broadcasts to (batch, heads, queries, keys), with groups apart or not.
    """
    if seen is None or seen.dtype is torch.int32:
        return seen, None
    seen = seen.flatten(1, -3)
    queries_of, keys_of = (1 if n == 1 else MASK_BLOCK for n in seen.shape[2:])
    padded: Tensor = F.pad(seen, (0, -seen.shape[3] % keys_of, 0, -seen.shape[2] % queries_of))
    batch, heads, rows, columns = padded.shape
    blocks = padded.view(batch, heads, rows // queries_of, queries_of, columns // keys_of, keys_of)
    counts = blocks.sum((1, 3, 5), dtype=torch.int32)
    is_full = counts == heads * queries_of * keys_of
    spans = torch.cat((_ends(counts > 0, is_full, queries, keys), _ends(counts.mT > 0, is_full.mT, keys, queries)), -1)
    mask = seen.expand(-1, -1, -1, keys)
    return spans, mask if mask.stride(-1) == 1 else mask.contiguous()


def _ends(some: Tensor, full: Tensor, rows: int, tokens: int) -> Tensor:
    """int32 (batch or 1, 4, rows): begin and end of the blocks of which each row sees some, then of the longest run of
    blocks of which it sees all. Both masks are bool (batch or 1, blocks of rows, blocks of tokens); a block may be all.
    """
    across, along = some.shape[1:]
    index = torch.arange(along, device=some.device)
    first, last = torch.where(some, index, along).amin(-1), torch.where(some, index + 1, 0).amax(-1)
    length, end = (index - torch.where(full, -1, index).cummax(-1).values).max(-1)
    ends = torch.stack((first.minimum(last), last, end + 1 - length, end + 1), 1)
    ends = (ends * (MASK_BLOCK if along > 1 else tokens)).clamp(max=tokens).to(torch.int32)
    return ends.repeat_interleave(MASK_BLOCK if across > 1 else rows, -1)[..., :rows]


def forward(
    planes: tuple[Operand, Operand, Operand],
    sizes: tuple[int, ...],
    p_scale: Tensor | None,
    options: Options,
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output (batch, queries, heads, width) and log-sum-exp (batch, heads, queries) by the FP8 kernel.

    Planes of query and key are (batch tokens, heads width), that of value (heads width, batch tokens). `sizes` are
    batch, groups, heads of a group, queries, keys and width, and `seen` is that of `sight`.
    """
    from duotone.kernels import attention  # loads Triton

    batch, groups, heads, queries, keys, width = sizes
    shapes = (batch, queries, groups * heads, width), (batch, keys, groups, width), (groups, width, batch, keys)
    codes = [
        _filled(contiguous_rows(plane.parts["codes"]).view(torch.float8_e4m3fn).view(shape), axis)
        for plane, shape, axis in zip(planes, shapes, (3, 3, 1), strict=True)
    ]
    q_scale, k_scale, v_scale = (plane.parts["scale"] for plane in planes)
    scales, sees = (q_scale, k_scale, v_scale), sight(seen, queries, keys)
    out, lse = attention.attend((codes[0], codes[1], codes[2]), scales, p_scale, options, *sees)
    return out[..., :width].contiguous(), lse


def _filled(heads: Tensor, axis: int) -> Tensor:
    """Heads with zeros up to a width of the kernels; `axis`, the last one or 1 of four, is that of the width."""
    missing = next(wide for wide in WIDTHS if wide >= heads.shape[axis]) - heads.shape[axis]
    if not missing:
        return heads
    ends = (0, 0) * (3 - axis) + (0, missing)
    return F.pad(heads.view(torch.uint8) if heads.itemsize == 1 else heads, ends).view(heads.dtype)


Planes = Mapping[str, Operand]
"""The planes of a tensor by direction: "rowwise" (batch tokens, heads width), "columnwise" its transpose."""


def _operand(planes: Planes, sizes: tuple[int, ...], direction: str, dtype: torch.dtype | None) -> "KernelOperand":
    """A tensor (batch, tokens, heads, width) as the kernel reads it, in FP8 or in `dtype`."""
    from duotone.kernels.attention_backward import Operand as KernelOperand

    batch, tokens, heads, width = sizes
    stored = direction if direction in planes else next(iter(planes))
    plane, layout = planes[stored], direction if dtype is None else "rowwise"
    codes = plane.parts["codes"]
    if dtype is not None and plane.format.code_dtype in FP8:
        values = decoded(plane.format, plane.parts, dtype, scaled=False)
        codes = codes.view(plane.format.code_dtype).to(dtype) if values is None else values
    codes = codes if stored == layout else codes.t()
    if dtype is None and plane.format.code_dtype in FP8:
        codes = contiguous_rows(codes).view(plane.format.code_dtype)
    codes = codes.contiguous()
    shape, axis = ((batch, tokens, heads, width), 3) if layout == "rowwise" else ((heads, width, batch, tokens), 1)
    return KernelOperand(_filled(codes.view(shape), axis), plane.parts.get("scale"))


class Rounding(NamedTuple):
    """Formats of P and dS in backward, and the scales of their values; None without a delayed scale."""

    p: Format
    ds: Format
    p_scale: Tensor | None
    ds_scale: Tensor | None


def backward(
    rounding: Rounding,
    planes: tuple[Planes, Planes, Planes, Planes, Planes],
    sizes: tuple[int, ...],
    native: frozenset[str],
    lse: Tensor,
    options: Options,
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key and value (batch, tokens, heads, width), and the amax of dS if it has a delayed scale.

    `planes` are those of query, key, value, the saved output and its gradient; `native` the products in FP8.
    """
    from duotone.kernels import attention_backward as kernels  # loads Triton

    batch, groups, heads, queries, keys, width = sizes
    of_queries, of_keys = (batch, queries, groups * heads, width), (batch, keys, groups, width)
    query, key, value, out, gradient = planes

    def read(planes: Planes, shape: tuple[int, ...], direction: str, product: str) -> kernels.Operand:
        return _operand(planes, shape, direction, None if product in native else options.dtype)

    operands = kernels.BackwardOperands(
        q_row=read(query, of_queries, "rowwise", "QK^T again"),
        q_col=read(query, of_queries, "columnwise", "dS^T Q"),
        k_row=read(key, of_keys, "rowwise", "QK^T again"),
        k_col=read(key, of_keys, "columnwise", "dS K"),
        v_row=read(value, of_keys, "rowwise", "dO V^T"),
        do_row=read(gradient, of_queries, "rowwise", "dO V^T"),
        do_col=read(gradient, of_queries, "columnwise", "P^T dO"),
        out=_operand(out, of_queries, "rowwise", None),
    )
    p, ds = (fmt.code_dtype if fmt.code_dtype in FP8 else None for fmt in rounding[:2])
    weights = kernels.Weights(p, ds, rounding.p_scale, rounding.ds_scale)
    sees = sight(seen, queries, keys)
    is_hopper = not lse.is_cuda or cuda_target(lse.get_device()).arch == HOPPER
    tiles = kernels.tiles_for(operands, weights, is_hopper)
    *gradients, peak = kernels.differentiate(operands, weights, lse.contiguous(), options, *sees, tiles)
    dq, dk, dv = (each[..., :width].contiguous() for each in gradients)
    return dq, dk, dv, peak


def torch_backward(
    gradient: Tensor, heads: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value (batch, heads, tokens, width), which planes hold, by torch's kernels.

    `gradient` is that of `out`, in one dtype with all heads; `lse` is fp32 (batch, heads, queries).
    """
    scale, causal, *_ = options
    # Kernels read rows of heads; the plane of values is transposed.
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in heads)
    if query.is_cpu:
        repeats = query.shape[1] // key.shape[1]
        wide = (x.repeat_interleave(repeats, 1) for x in (key, value))
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = kernel(gradient, query, *wide, out, lse, 0.0, causal, scale=scale)
        return dq, dk.unflatten(1, (-1, repeats)).sum(2), dv.unflatten(1, (-1, repeats)).sum(2)
    call, lengths = (gradient, query, key, value, out), (None, None, query.shape[2], key.shape[2], 0.0, causal)
    if cuda_target(query.get_device()).arch == HOPPER:
        random = torch.zeros((), dtype=torch.int64, device=query.device)  # for dropout, which is off
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
        return cudnn(*call, lse.unsqueeze(-1), random, random, None, *lengths, scale=scale)
    random = torch.zeros(2, dtype=torch.uint64, device=query.device)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_backward
    return flash(*call, lse, *lengths, random, random, scale=scale)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dropout: float,
    scale: float | None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """softmax(Q K^T) V of heads (batch, heads, tokens, width) by torch, or by cuDNN if that is faster.

    cuDNN is called by its op. Torch also accepts an order of kernels, but drops it in a trace.
    """
    if attn_mask is None and _takes_cudnn(query, key, value, is_causal):
        trains = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        kernel = torch.ops.aten._scaled_dot_product_cudnn_attention
        return kernel(query, key, value, None, trains, dropout, is_causal, False, scale=scale)[0]
    options = {"dropout_p": dropout, "scale": scale, "enable_gqa": query.shape[-3] != key.shape[-3]}
    masking = {"is_causal": is_causal} if attn_mask is None else {"attn_mask": attn_mask}
    return F.scaled_dot_product_attention(query, key, value, **options, **masking)  # type: ignore[arg-type]


def _takes_cudnn(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> bool:
    """Whether cuDNN is the fastest kernel for heads, and takes them."""
    if not query.is_cuda or query.dim() != 4 or F.scaled_dot_product_attention is not SDPA:
        return False  # torch's context parallelism, for example, replaces that function
    queries, keys, dtype = query.shape[-2], key.shape[-2], query.dtype
    if queries < CUDNN_TOKENS or keys < CUDNN_TOKENS or (is_causal and queries != keys) or dtype not in HALF:
        return False
    if torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") != dtype:
        return False
    for x in (query, key, value):
        width = x.shape[-1]
        if type(x) is not Tensor or x.dtype != dtype or x.stride(-1) != 1 or width % 8 or width > CUDNN_WIDTH:
            return False
    return _allows_cudnn(query.get_device())


@constant_in_traces
def _allows_cudnn(device: int) -> bool:
    """Whether cuDNN's attention was measured on such a device, and the user has not forbidden it."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()
    return enabled and cuda_target(device).arch == HOPPER
