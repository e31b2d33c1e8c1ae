"""Which kernels run attention in low precision: forward over FP8 codes, and a backward in high precision by torch."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel

from duotone.dispatch.rule import Operand
from duotone.dispatch.target import HOPPER, Target, cuda_target
from duotone.formats import IDENTITY, Format
from duotone.formats.geometry import TENSOR

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
WIDTHS = (64, 128)
FORWARD, BACKWARD = ("QK^T", "PV"), ("P^T dO", "dO V^T", "dS K", "dS^T Q")
FORWARD_KERNEL = "FP8 attention"
# bench/results/2026-11-22-h200-attention.jsonl, casts included: slower at 4096 tokens, faster from 8192 on.
LEAST_TOKENS: dict[tuple[int, int], int] = {HOPPER: 8192}
"""Queries of heads of width 128 from which the FP8 kernel pays for its casts, by compute capability."""

HALF = (torch.bfloat16, torch.float16)
CUDNN_TOKENS, CUDNN_WIDTH = 2048, 128
"""Queries from which cuDNN was measured to be faster than FlashAttention-2 on Hopper, and its widest heads."""


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
        return f"no attention kernel takes {', '.join(odd)}" if odd else ""

    def forward_refusal(self) -> str:
        """Why the FP8 kernel does not run the products of forward, or ""."""
        formats = [fmt for name in FORWARD for fmt in self.products[name]]
        if refusal := self.never():
            return refusal
        if any(fmt.code_dtype != torch.float8_e4m3fn for fmt in formats):
            return "the FP8 kernel multiplies E4M3 with E4M3"
        if self.widths not in ((width, width) for width in WIDTHS):
            return f"the FP8 kernel takes heads of width {' or '.join(map(str, WIDTHS))}"
        if self.dropout:
            return "the FP8 kernel has no dropout"
        return "" if self.target.runs_kernels else "the FP8 kernel needs an NVIDIA GPU with FP8, and Triton"

    def least_tokens(self, wanted: int | str) -> int:
        """Queries below which a native product stays in high precision, as `dpa_min_tokens` of a recipe wants it."""
        if not wanted or self.forward_refusal():
            return 0
        return LEAST_TOKENS.get(self.target.arch, 0) if isinstance(wanted, str) else wanted

    @property
    def backward_kernel(self) -> str:
        """What runs the products of backward in high precision."""
        return "cuDNN" if self.target.arch == HOPPER else "FlashAttention-2"

    def backward_refusal(self) -> str:
        """Why torch's kernel does not run the products of backward, or ""."""
        if refusal := self.forward_refusal():
            return refusal
        gradients = [self.products[name][0] for name in BACKWARD] + [self.products["P^T dO"][1]]
        if any(fmt != IDENTITY for fmt in gradients):
            return "no kernel for gradients in low precision"
        return ""


def forward(
    planes: tuple[Operand, Operand, Operand],
    sizes: tuple[int, ...],
    p_scale: Tensor | None,
    scale: float,
    causal: bool,
    fast: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Output (batch, queries, heads, width) and log-sum-exp (batch, heads, queries) by the FP8 kernel.

    Planes of query and key are (batch tokens, heads width), that of value (heads width, batch tokens). `sizes` are
    batch, groups, heads of a group, queries, keys and width.
    """
    from duotone.kernels import attention  # loads Triton

    batch, groups, heads, queries, keys, width = sizes
    shapes = (batch, queries, groups * heads, width), (batch, keys, groups, width), (groups, width, batch, keys)
    codes = [
        plane.parts["codes"].contiguous().view(torch.float8_e4m3fn).view(shape)
        for plane, shape in zip(planes, shapes, strict=True)
    ]
    q_scale, k_scale, v_scale = (plane.parts["scale"] for plane in planes)
    return attention.attend(
        (codes[0], codes[1], codes[2]), (q_scale, k_scale, v_scale), p_scale, scale, causal, fast, dtype
    )


def backward(
    gradient: Tensor, heads: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value (batch, heads, tokens, width), which planes hold, by torch's kernels.

    `gradient` is that of `out`, in one dtype with all heads; `lse` is fp32 (batch, heads, queries).
    """
    # Kernels want rows of heads; a plane of values lies the other way.
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in heads)
    if query.is_cpu:
        repeats = query.shape[1] // key.shape[1]
        wide = (x.repeat_interleave(repeats, 1) for x in (key, value))
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = kernel(gradient, query, *wide, out, lse, 0.0, causal, scale=scale)
        return dq, dk.unflatten(1, (-1, repeats)).sum(2), dv.unflatten(1, (-1, repeats)).sum(2)
    call, lengths = (gradient, query, key, value, out), (None, None, query.shape[2], key.shape[2], 0.0, causal)
    if cuda_target(query.get_device()).arch == HOPPER:
        random = torch.zeros((), dtype=torch.int64, device=query.device)  # of dropout, which is off
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
        return cudnn(*call, lse.unsqueeze(-1), random, random, None, *lengths, scale=scale)
    random = torch.zeros(2, dtype=torch.uint64, device=query.device)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_backward
    return flash(*call, lse, *lengths, random, random, scale=scale)


def favourite(query: Tensor, value: Tensor, is_masked: bool) -> AbstractContextManager[object]:
    """A context in which torch's attention takes the fastest kernel that is enabled; heads are (..., tokens, width)."""
    wide = max(query.shape[-1], value.shape[-1]) > CUDNN_WIDTH or query.shape[-2] < CUDNN_TOKENS
    if is_masked or wide or query.dtype not in HALF or not query.is_cuda:
        return NOTHING
    if cuda_target(query.get_device()).arch != HOPPER or not torch.backends.cuda.cudnn_sdp_enabled():
        return NOTHING
    backends: list[SDPBackend] = [SDPBackend.CUDNN_ATTENTION, *_cur_sdpa_kernel_backends()]  # type: ignore
    return sdpa_kernel(backends, set_priority=True)  # type: ignore


NOTHING = nullcontext()
