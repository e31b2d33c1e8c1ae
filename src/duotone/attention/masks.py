"""Masks of attention: which key each query sees, from positions in sequences rather than from stored triangles."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from duotone.errors import UserError

Window = tuple[int, int]
Masks = Tensor | tuple[Tensor, Tensor] | None
"""One mask, or one of queries and one of keys."""

Lengths = Tensor | None
UNBOUNDED: Window = (-1, -1)


@dataclass(frozen=True)
class MaskType:
    """`padding` and `arbitrary` masks come with the call. `from_end` aligns the ends of unequally long sequences."""

    causal: bool = False
    padding: bool = False
    arbitrary: bool = False
    from_end: bool = True


MASK_TYPES = {
    "no_mask": MaskType(),
    "causal": MaskType(causal=True, from_end=False),
    "causal_bottom_right": MaskType(causal=True),
    "padding": MaskType(padding=True),
    "padding_causal": MaskType(causal=True, padding=True, from_end=False),
    "padding_causal_bottom_right": MaskType(causal=True, padding=True),
    "arbitrary": MaskType(arbitrary=True),
}
"""Transformer Engine's names; the diagonal of a window without causality is at the bottom right, as there."""


def mask_type(name: str) -> MaskType:
    if name not in MASK_TYPES:
        raise UserError(f"attn_mask_type {name!r} is unknown; allowed are {', '.join(map(repr, MASK_TYPES))}")
    return MASK_TYPES[name]


def window_of(kind: MaskType, size: Window | None) -> Window:
    """How many keys before and after its own position a query sees, -1 for all; causality allows none after."""
    left, right = size or UNBOUNDED
    if min(left, right) < -1 or (kind.causal and right > 0):
        allowed = "(left, 0)" if kind.causal else "(left, right)"
        raise UserError(f"window_size is {size}; give {allowed} with numbers from -1 on, -1 for no bound")
    return (left, 0) if kind.causal else (left, right)


class Side(NamedTuple):
    """The tokens of queries or of keys: their position within their sequence, and which sequence that is.

    `position` is int64 (tokens,) or (batch, 1, tokens), from the start or, negative, from the end. `sequence` has its
    shape, below 0 for padding; None is one sequence of all tokens.
    """

    position: Tensor
    sequence: Tensor | None = None


def whole(tokens: int, device: torch.device, from_end: bool = False) -> Side:
    return Side(torch.arange(tokens, device=device) - (tokens if from_end else 0))


def padded(real: Tensor, from_end: bool = False, padding: int = -1) -> Side:
    """Bool (batch, tokens), True for tokens and False for padding, which is wherever it is."""
    position = real.cumsum(-1) - 1 - (real.sum(-1, keepdim=True) if from_end else 0)
    return Side(position[:, None], torch.where(real, 0, padding)[:, None])


def packed(cu_seqlens: Tensor, tokens: int, from_end: bool = False, padding: int = -1) -> Side:
    """Sequences one after the other, from cu_seqlens[i] to cu_seqlens[i + 1]; tokens behind the last are padding."""
    index, ends = torch.arange(tokens, device=cu_seqlens.device), cu_seqlens[1:]
    sequence = torch.searchsorted(ends, index, right=True)
    edges = torch.cat((cu_seqlens, cu_seqlens[-1:]))
    position = index - edges[sequence + 1 if from_end else sequence]
    return Side(position, torch.where(sequence < len(ends), sequence, padding))


def visible(sides: tuple[Side, Side], window: Window) -> Tensor:
    """Bool (tokens of query, tokens of key), or (batch, 1, ...) of it: True where the query sees the key."""
    query, key = sides
    back = query.position[..., :, None] - key.position[..., None, :]
    left, right = window
    seen = torch.ones_like(back, dtype=torch.bool) if left < 0 else back <= left
    if right >= 0:
        seen = seen & (back >= -right)
    if query.sequence is not None and key.sequence is not None:
        seen = seen & (query.sequence[..., :, None] == key.sequence[..., None, :])
    return seen


@dataclass(frozen=True)
class Masking:
    """How a call masks: its type, its window, and whether sequences are packed."""

    kind: MaskType
    window: Window
    is_packed: bool

    def mask(self, query: Tensor, key: Tensor, mask: Masks, cu_seqlens: tuple[Lengths, Lengths]) -> Tensor | None:
        """Bool, True for a key that is seen, for heads (batch, heads, tokens, depth).

        None stands for all keys, or for the triangle of a causal type. UserError if masks or lengths do not fit.
        """
        kind, tokens = self.kind, (query.shape[2], key.shape[2])
        if mask is not None and (self.is_packed or not (kind.arbitrary or kind.padding)):
            raise UserError(
                "attention_mask is for unpacked sequences and types of padding or 'arbitrary'; leave it out"
            )
        if kind.arbitrary and self.is_packed:
            raise UserError("attn_mask_type 'arbitrary' takes no packed sequences ('thd'); use 'sbhd' or 'bshd'")
        if self.is_packed or kind.padding:
            masks = mask if isinstance(mask, tuple) else (mask, mask)
            sides = zip(tokens, masks, cu_seqlens, (-1, -2), strict=True)  # padding meets no padding
            first, second = (self._side(query.shape[0], *side) for side in sides)
            lengths = [len(edges) for edges in cu_seqlens if edges is not None and self.is_packed]
            if len(set(lengths)) > 1:
                raise UserError(f"cu_seqlens are of equal lengths; got {lengths[0]} and {lengths[1]}")
            return visible((first, second), self.window)
        triangle = kind.causal and (not kind.from_end or tokens[0] == tokens[1])
        seen = None
        if self.window != UNBOUNDED and not (triangle and self.window == (-1, 0)):
            first, second = (whole(count, query.device, kind.from_end) for count in tokens)
            seen = visible((first, second), self.window)
        return _seen(mask, (query.shape[0], query.shape[1], *tokens), seen) if kind.arbitrary else seen

    def _side(self, batch: int, tokens: int, mask: Tensor | None, cu_seqlens: Lengths, padding: int) -> Side:
        if mask is not None:
            return padded(_real(mask, batch, tokens), self.kind.from_end, padding)
        edges = _checked(cu_seqlens, None if self.is_packed else batch + 1, tokens if self.is_packed else None)
        if self.is_packed:
            return packed(edges, tokens, self.kind.from_end, padding)
        real = torch.arange(tokens, device=edges.device) < edges.diff()[:, None]
        return padded(real, self.kind.from_end, padding)


def _checked(cu_seqlens: Lengths, edges: int | None, tokens: int | None) -> Tensor:
    """UserError if edges of sequences have a wrong shape or, on the CPU, wrong values; a GPU is not waited for."""
    wanted = "integers (sequences + 1,), from 0 to the number of tokens, of queries and of keys"
    if cu_seqlens is None:
        raise UserError(f"packed or padded sequences need cu_seqlens: {wanted}; or an attention_mask of padding")
    is_integer = not (cu_seqlens.is_floating_point() or cu_seqlens.dtype is torch.bool)
    if not is_integer or cu_seqlens.dim() != 1 or len(cu_seqlens) != (edges or len(cu_seqlens)):
        raise UserError(f"cu_seqlens are {wanted}; got {tuple(cu_seqlens.shape)} in {cu_seqlens.dtype}")
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_dynamo_compiling():
        return cu_seqlens
    values = cu_seqlens.tolist()
    if not values or values[0] != 0 or sorted(values) != values or (tokens is not None and values[-1] > tokens):
        raise UserError(f"cu_seqlens are {wanted}, in ascending order; got {values} for {tokens or 'padded'} tokens")
    return cu_seqlens


def _real(mask: Tensor, batch: int, tokens: int) -> Tensor:
    """Bool (batch, tokens), True for tokens that are not padding."""
    if mask.dtype is not torch.bool or tuple(mask.shape) not in ((batch, tokens), (batch, 1, 1, tokens)):
        raise UserError(
            f"attention_mask of padding is bool ({batch}, {tokens}) or ({batch}, 1, 1, {tokens}), True for padding, or "
            f"one of queries and one of keys; got {tuple(mask.shape)} in {mask.dtype}"
        )
    return ~mask.view(batch, tokens)


def _seen(mask: Masks, shape: tuple[int, ...], within: Tensor | None) -> Tensor:
    """What an arbitrary mask leaves, and the window too if there is one."""
    if mask is None or isinstance(mask, tuple):
        raise UserError("attn_mask_type 'arbitrary' needs one attention_mask; give it, or change the type")
    fits = 2 <= mask.dim() <= 4 and all(n in (1, m) for n, m in zip(mask.shape[::-1], shape[::-1], strict=False))
    if mask.dtype is not torch.bool or not fits:
        raise UserError(
            f"an arbitrary attention_mask is bool, True for what is not seen, and broadcasts to {shape}; "
            f"got {tuple(mask.shape)} in {mask.dtype}"
        )
    return ~mask if within is None else ~mask & within
