"""Rotary position embedding: pairs of a head's elements turn by an angle that grows with the token's position."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from duotone.attention.heads import check_layout, token_axis
from duotone.attention.masks import packed
from duotone.errors import UserError


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
        """As nn.Module, but the rates stay fp32 and are made anew, so that they are right after meta too."""
        self.inv_freq = self._rates(fn(self.inv_freq).device)
        return self


def apply_rotary_pos_emb(
    t: Tensor, freqs: Angles, tensor_format: str = "sbhd", cu_seqlens: Tensor | None = None
) -> Tensor:
    """Turn `t`, heads in a layout of attention, by each token's angle; computed in fp32, same shape and dtype as `t`.

    `freqs` are angles (positions, width), also (positions, 1, 1, width), or their `Rotation`; row n is for token n of
    each sequence, which packed tokens ("thd") count by `cu_seqlens`. A width below that of the heads turns their first
    elements. UserError where rows or elements are too few.
    """
    cos, sin = (freqs.cos, freqs.sin) if isinstance(freqs, Rotation) else (freqs.float().cos(), freqs.float().sin())
    width, tokens = cos.shape[-1], t.shape[token_axis(check_layout(tensor_format))]
    if width % 2 or width > t.shape[-1]:
        raise UserError(f"rotary angles of width {width} cannot turn heads of width {t.shape[-1]}; give an even part")
    if tensor_format == "thd":
        if cu_seqlens is None:
            raise UserError("rotary angles of packed sequences ('thd') need cu_seqlens: positions start anew in each")
        rows = packed(cu_seqlens, tokens).position[0]
    elif tokens > cos.shape[0]:
        raise UserError(f"rotary angles are for {cos.shape[0]} positions and the sequence has {tokens}; make more")
    else:
        rows = slice(tokens)
    shape = {"sbhd": (tokens, 1, 1, width), "bshd": (tokens, 1, width), "thd": (tokens, 1, width)}[tensor_format]
    cos, sin = (table.reshape(-1, width)[rows].view(shape) for table in (cos, sin))
    first, second = t[..., :width].chunk(2, dim=-1)
    turned = (t[..., :width] * cos + torch.cat((-second, first), dim=-1) * sin).to(t.dtype)
    return turned if width == t.shape[-1] else torch.cat((turned, t[..., width:]), dim=-1)
