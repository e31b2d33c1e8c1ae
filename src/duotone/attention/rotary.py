"""Rotary position embedding: pairs of a head's elements turn by an angle that grows with the token's position."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from duotone.attention.heads import check_layout, token_axis
from duotone.attention.masks import packed
from duotone.attention.ranks import Ranks
from duotone.dispatch.casts import has_kernels
from duotone.errors import UserError
from duotone.pipeline.autograd import is_transformed
from duotone.state.torch_private import is_legacy_batched


class Rotation(NamedTuple):
    """Cosines and sines of the angles, each (positions, width) with equal halves."""

    cos: Tensor
    sin: Tensor


Angles = Tensor | Rotation


class RotaryPositionEmbedding(nn.Module):
    """forward(max_seq_len, offset=0) -> angles in fp32 (max_seq_len, dim), both halves of a row alike.

    A `dim` below the heads' width turns their first `dim` elements. UserError unless `dim` is even.
    """

    inv_freq: Tensor

    def __init__(self, dim: int, rotary_base: float = 10000.0) -> None:
        super().__init__()
        if dim <= 0 or dim % 2:
            raise UserError(f"dim is {dim}; rotary embeddings turn pairs: give an even number above 0")
        self.dim, self.rotary_base = dim, rotary_base
        self.register_buffer("inv_freq", self._rates(None), persistent=False)

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        positions = torch.arange(offset, offset + max_seq_len, device=self.inv_freq.device, dtype=torch.float32)
        return torch.outer(positions, self.inv_freq).repeat(1, 2)

    def _rates(self, device: torch.device | None) -> Tensor:
        return self.rotary_base ** (-torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryPositionEmbedding":
        """Like nn.Module. The rates stay fp32 and are computed anew, because rates on meta have no values."""
        self.inv_freq = self._rates(fn(self.inv_freq).device)
        return self


def apply_rotary_pos_emb(
    t: Tensor, freqs: Angles, tensor_format: str = "sbhd", cu_seqlens: Tensor | None = None
) -> Tensor:
    """Turn `t`, heads in a layout of attention, by each token's angle; computed in fp32, same shape and dtype as `t`.

    `freqs` are angles (positions, width), also (positions, 1, 1, width), or their `Rotation`. Row n is for token n of
    each sequence. `cu_seqlens` delimit the sequences of packed tokens ("thd"). A width below that of the heads turns
    their first elements. UserError if there are too few rows or elements.
    """
    cos, sin = (freqs.cos, freqs.sin) if isinstance(freqs, Rotation) else (freqs.float().cos(), freqs.float().sin())
    width, tokens = cos.shape[-1], t.shape[token_axis(check_layout(tensor_format))]
    if width % 2 or width > t.shape[-1]:
        raise UserError(f"rotary angles of width {width} cannot turn heads of width {t.shape[-1]}; give an even part")
    if tensor_format == "thd":
        if cu_seqlens is None:
            raise UserError("rotary angles of packed sequences ('thd') need cu_seqlens: positions start anew in each")
        ranks = Ranks.now()
        side = packed(cu_seqlens, tokens * (1 if ranks is None else ranks.size))
        rows = torch.where(side.sequence[0] < 0, 0, side.position[0])  # tokens behind the last sequence are padding
        rows = rows if ranks is None else rows[ranks.places(tokens, rows.device)]
        _require_rows(rows, cos.shape[0])
    elif tokens > cos.shape[0]:
        raise UserError(f"rotary angles are for {cos.shape[0]} positions and the sequence has {tokens}; make more")
    else:
        rows = slice(tokens)
    shape = {"sbhd": (tokens, 1, 1, width), "bshd": (tokens, 1, width), "thd": (tokens, 1, width)}[tensor_format]
    cos, sin = (table.reshape(-1, width)[rows].view(shape) for table in (cos, sin))
    is_whole = width == t.shape[-1] and t.dim() == (3 if tensor_format == "thd" else 4)
    if is_whole and _fits(t) and not is_transformed() and all(_is_fixed(table, t) for table in (cos, sin)):
        return Turn.apply(t, cos, sin, False)  # type: ignore[no-any-return]
    turned = _turned(t[..., :width], cos, sin)
    return turned if width == t.shape[-1] else torch.cat((turned, t[..., width:]), dim=-1)


def _require_rows(rows: Tensor, count: int) -> None:
    """UserError for rows on the CPU that are not among so many. On a GPU the device asserts it."""
    if rows.is_cpu and type(rows) is Tensor and rows.numel() and not is_transformed():
        if not torch.compiler.is_dynamo_compiling() and (most := int(rows.max())) >= count:
            raise UserError(f"rotary angles are for {count} positions and a sequence has {most + 1}; make more")


def _turned(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = t.chunk(2, dim=-1)
    return (t * cos + torch.cat((-second, first), dim=-1) * sin).to(t.dtype)


def _turned_back(dy: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of `_turned`, as autograd computes and rounds it."""
    first, second = (dy * sin).to(dy.dtype).chunk(2, dim=-1)
    return (dy * cos).to(dy.dtype) + torch.cat((second, -first), dim=-1)


def _fits(t: Tensor) -> bool:
    """Whether a kernel turns heads like these; gradients of a batch (`is_grads_batched`) have no address."""
    if not has_kernels(t) or t.stride(-1) != 1:  # first: a trace cannot follow the code below
        return False
    if t.shape[-2] * t.stride(-2) >= 2**31:  # offsets of heads are int32
        return False
    return not torch.jit.is_tracing() and not is_legacy_batched(t)  # type: ignore[no-untyped-call]


def _is_fixed(table: Tensor, t: Tensor) -> bool:
    """Whether a kernel for `t` reads cosines or sines as they are."""
    return table.dtype is torch.float32 and table.device == t.device and not table.requires_grad


class TurnContext(FunctionCtx):
    """What `Turn` saves for its backward."""

    saved_tensors: tuple[Tensor, Tensor]
    back: bool


class Turn(torch.autograd.Function):
    """`_turned`, or with `back` `_turned_back`, by one kernel."""

    @staticmethod
    def forward(ctx: TurnContext, t: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
        from duotone.kernels.rotary import turn

        ctx.save_for_backward(cos, sin)
        ctx.back, out, width = back, torch.empty_like(t), t.shape[-1]
        of_t, of_out = (
            x.unsqueeze(0) if x.dim() == 3 else x.transpose(0, 1) if cos.dim() == 4 else x for x in (t, out)
        )
        turn(of_t, of_out, cos.reshape(-1, width).contiguous(), sin.reshape(-1, width).contiguous(), back)
        return out

    @staticmethod
    def backward(ctx: TurnContext, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (dy,), (cos, sin) = gradients, ctx.saved_tensors
        if is_transformed() or not _fits(dy):
            plain = _turned if ctx.back else _turned_back
            return plain(dy, cos, sin), None, None, None
        return Turn.apply(dy, cos, sin, not ctx.back), None, None, None
