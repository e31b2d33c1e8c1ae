"""Masks of attention: which key each query sees, from positions in sequences rather than from stored triangles."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from duotone.attention.ranks import Ranks
from duotone.errors import UserError, one_of

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
"""By Transformer Engine's names. As there, a window without causality has its diagonal at the bottom right."""


def mask_type(name: str) -> MaskType:
    """The kind of mask that a name of Transformer Engine means. UserError if it is unknown."""
    one_of("attn_mask_type", name, MASK_TYPES)
    return MASK_TYPES[name]


def window_of(kind: MaskType, size: Window | None) -> Window:
    """The number of keys that a query sees before and after its position; -1 is all. Causality allows none after it."""
    size = UNBOUNDED if size is None else size
    is_pair = isinstance(size, tuple | list) and len(size) == 2 and all(type(side) is int for side in size)
    if not is_pair or min(size) < -1:
        raise UserError(f"window_size is {size}; give (left, right) with numbers from -1 on, -1 for no bound")
    return size[0], 0 if kind.causal else size[1]


class Side(NamedTuple):
    """The tokens of queries or of keys: their position within their sequence, and which sequence that is.

    Both are int64 (batch or 1, tokens). Positions are from the start or, negative, from the end; sequences are below 0
    for padding. `first` and `count`, int64 (sequences,), say where each sequence lies, if its tokens lie together.
    """

    position: Tensor
    sequence: Tensor
    first: Tensor
    count: Tensor


def whole(tokens: int, device: torch.device, from_end: bool = False) -> Side:
    """One sequence of all tokens."""
    index, count = torch.arange(tokens, device=device)[None], torch.full((1,), tokens, device=device)
    return Side(index - (tokens if from_end else 0), torch.zeros_like(index), torch.zeros_like(count), count)


def padded(real: Tensor, from_end: bool = False, padding: int = -1) -> Side:
    """From bool (batch, tokens): True for tokens, False for padding, which may be anywhere."""
    count, batch = real.sum(-1), torch.arange(len(real), device=real.device)
    position = real.cumsum(-1) - 1 - (count[:, None] if from_end else 0)
    return Side(position, torch.where(real, batch[:, None], padding), torch.zeros_like(count), count)


def packed(cu_seqlens: Tensor, tokens: int, from_end: bool = False) -> Side:
    """Sequences one after the other, from cu_seqlens[i] to cu_seqlens[i + 1]; tokens behind the last are padding.

    Edges above the number of tokens are that number."""
    cu_seqlens = cu_seqlens.clamp(max=tokens)
    index, ends = torch.arange(tokens, device=cu_seqlens.device), cu_seqlens[1:]
    sequence = torch.searchsorted(ends, index, right=True)
    edges = torch.cat((cu_seqlens, cu_seqlens[-1:]))
    position = index - edges[sequence + 1 if from_end else sequence]
    sequence = torch.where(sequence < len(ends), sequence, -1)
    return Side(position[None], sequence[None], cu_seqlens[:-1], cu_seqlens.diff())


def visible(sides: tuple[Side, Side], window: Window) -> Tensor:
    """Bool (batch or 1, 1, queries, keys): True where the query sees the key."""
    query, key = sides
    back = query.position[:, None, :, None] - key.position[:, None, None, :]
    left, right = window
    seen = query.sequence[:, None, :, None] == key.sequence[:, None, None, :]
    if left >= 0:
        seen = seen & (back <= left)
    return seen & (back >= -right) if right >= 0 else seen


def spans(sides: tuple[Side, Side], window: Window, from_end: bool) -> Tensor:
    """int32 (batch or 1, 2, queries + keys): the first key that each query sees and the one after the last, then the
    first query that sees each key and the one after the last. Tokens of each sequence lie together."""
    (query, key), (left, right) = sides, window
    both = _spans(query, key, (left, right), from_end), _spans(key, query, (right, left), from_end)
    return torch.cat(both, -1).to(torch.int32)


def _spans(side: Side, other: Side, window: Window, from_end: bool) -> Tensor:
    sequence = side.sequence.clamp(min=0)
    first, count = (each[sequence] for each in (other.first, other.count))
    place = side.position + (count if from_end else 0)
    left, right = window
    end = count if right < 0 else (place + right + 1).clamp(min=0).minimum(count)
    start = torch.zeros_like(count) if left < 0 else (place - left).clamp(min=0).minimum(end)
    is_real = side.sequence >= 0
    return torch.stack([torch.where(is_real, first + edge, 0) for edge in (start, end)], 1)


def seen_by(spans: Tensor, queries: slice, keys: slice) -> Tensor:
    """Bool (batch or 1, 1, queries, keys) of `spans`: True where the query sees the key."""
    start, end = spans[:, :, queries].unbind(1)
    index = torch.arange(keys.start, keys.stop, device=spans.device)
    return ((index >= start[..., None]) & (index < end[..., None]))[:, None]


@dataclass(frozen=True)
class Masking:
    """How a call masks: its type, its window, whether sequences are packed, and the ranks that share them.

    With ranks, heads and masks of padding are those of a rank's tokens, and lengths are those of whole sequences. The
    result is for the queries of this rank and all keys. An arbitrary mask has rows for these queries and columns for
    all keys.
    """

    kind: MaskType
    window: Window
    is_packed: bool
    ranks: Ranks | None = None

    def mask(self, query: Tensor, key: Tensor, mask: Masks, cu_seqlens: tuple[Lengths, Lengths]) -> Tensor | None:
        """For heads (batch, heads, tokens, depth): bool, True for a key that is seen, or int32 `spans` of what is seen.

        None means all keys, or the triangle of a causal type. UserError if masks or lengths do not fit.
        """
        kind, count = self.kind, 1 if self.ranks is None else self.ranks.size
        tokens = query.shape[2] * count, key.shape[2] * count
        masks = _pair(mask, cu_seqlens, query.device)
        if mask is not None and (self.is_packed or not (kind.arbitrary or kind.padding)):
            raise UserError(
                "attention_mask is for unpacked sequences and types of padding or 'arbitrary'; leave it out"
            )
        if not (self.is_packed or kind.padding or (cu_seqlens[0] is None and cu_seqlens[1] is None)):
            raise UserError(
                "cu_seqlens are for packed sequences ('thd') and types of padding; leave them out, or change the type"
            )
        if kind.arbitrary and self.is_packed:
            raise UserError("attn_mask_type 'arbitrary' takes no packed sequences ('thd'); use 'sbhd' or 'bshd'")
        if kind.padding and not self.is_packed and mask is not None:
            sides = zip(tokens, masks, cu_seqlens, (-1, -2), strict=True)  # padding of queries sees no padding of keys
            first, second = (self._padded(query.shape[0], *side) for side in sides)
            if self.ranks is not None:
                place = self.ranks.places(query.shape[2], query.device)
                first = first._replace(position=first.position[:, place], sequence=first.sequence[:, place])
            return visible((first, second), self.window)
        if self.is_packed or kind.padding:
            first, second = (self._side(query.shape[0], *side) for side in zip(tokens, cu_seqlens, strict=True))
            if len(first.count) != len(second.count):
                lengths = [len(side.count) + 1 for side in (first, second)]
                raise UserError(f"cu_seqlens are of equal lengths; got {lengths[0]} and {lengths[1]}")
            return self._local(spans((first, second), self.window, kind.from_end), query)
        triangle = kind.causal and (not kind.from_end or tokens[0] == tokens[1])
        seen = None
        if self.window != UNBOUNDED and not (triangle and self.window == (-1, 0)):
            first, second = (whole(count, query.device, kind.from_end) for count in tokens)
            seen = self._local(spans((first, second), self.window, kind.from_end), query)
        if not kind.arbitrary:
            return seen
        within = None if seen is None else seen_by(seen, slice(0, query.shape[2]), slice(0, tokens[1]))
        return _seen(mask, (*query.shape[:3], tokens[1]), within)

    def _local(self, seen: Tensor, query: Tensor) -> Tensor:
        return seen if self.ranks is None else self.ranks.local_spans(seen, query.shape[2])

    def _padded(self, batch: int, tokens: int, mask: Tensor | None, cu_seqlens: Lengths, padding: int) -> Side:
        if mask is None:
            real = _real_lengths(batch, tokens, cu_seqlens)
        elif self.ranks is None:
            real = _real(mask, batch, tokens)
        else:
            real = self.ranks.gathered(_real(mask, batch, tokens // self.ranks.size), 1)
        return padded(real, self.kind.from_end, padding)

    def _side(self, batch: int, tokens: int, cu_seqlens: Lengths) -> Side:
        if self.is_packed:
            return packed(checked_edges(cu_seqlens, tokens), tokens, self.kind.from_end)
        return padded(_real_lengths(batch, tokens, cu_seqlens), self.kind.from_end)


def _pair(mask: Masks, cu_seqlens: tuple[Lengths, Lengths], device: torch.device) -> tuple[Tensor | None, ...]:
    """The masks of queries and of keys. UserError unless they and lengths are tensors on the device of the heads."""
    masks = mask if isinstance(mask, tuple) else (mask, mask)
    if len(masks) != 2:
        raise UserError(f"attention_mask is one mask, or a pair of those of queries and of keys; got {len(masks)}")
    places = [getattr(x, "device", type(x).__name__) for x in (*masks, *cu_seqlens) if x is not None]
    if any(place != device for place in places):
        raise UserError(
            f"attention_mask, or a pair of queries and keys, and cu_seqlens are tensors on {device} as the heads; got "
            f"{', '.join(map(str, places))}: move them"
        )
    return masks


def _real_lengths(batch: int, tokens: int, cu_seqlens: Lengths) -> Tensor:
    """Bool (batch, tokens), True for the first tokens of each sequence, as many as it has."""
    edges = checked_edges(cu_seqlens, tokens, batch + 1)
    return torch.arange(tokens, device=edges.device) < edges.diff()[:, None]


def checked_edges(cu_seqlens: Lengths, tokens: int, edges: int | None = None) -> Tensor:
    """UserError if edges of sequences have a wrong shape or, on the CPU, wrong values. Nothing waits for a GPU.

    If each sequence has a row of `tokens`, `edges` is their number. Otherwise `tokens` are those of all sequences.
    """
    expected = "integers (sequences + 1,), from 0 to the number of tokens, of queries and of keys"
    if cu_seqlens is None:
        raise UserError(f"packed or padded sequences need cu_seqlens: {expected}; or an attention_mask of padding")
    if not isinstance(cu_seqlens, Tensor):
        raise UserError(f"cu_seqlens are {expected}; got {type(cu_seqlens).__name__}: give a tensor")
    is_integer = not (cu_seqlens.is_floating_point() or cu_seqlens.dtype is torch.bool)
    if not is_integer or cu_seqlens.dim() != 1 or len(cu_seqlens) != (edges or len(cu_seqlens)):
        raise UserError(f"cu_seqlens are {expected}; got {tuple(cu_seqlens.shape)} in {cu_seqlens.dtype}")
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_dynamo_compiling():
        return cu_seqlens
    values = cu_seqlens.tolist()
    lengths = cu_seqlens.diff().tolist() if edges else values
    if not values or values[0] != 0 or sorted(values) != values or max(lengths, default=0) > tokens:
        per_row = " in each row" if edges else ""
        raise UserError(f"cu_seqlens are {expected}, in ascending order; got {values} for {tokens} tokens{per_row}")
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
    """The keys that an arbitrary mask leaves, within the window unless that is None."""
    if mask is None or isinstance(mask, tuple):
        raise UserError("attn_mask_type 'arbitrary' needs one attention_mask; give it, or change the type")
    fits = 2 <= mask.dim() <= 4 and all(n in (1, m) for n, m in zip(mask.shape[::-1], shape[::-1], strict=False))
    if mask.dtype is not torch.bool or not fits:
        raise UserError(
            f"an arbitrary attention_mask is bool, True for what is not seen, and broadcasts to {shape}; "
            f"got {tuple(mask.shape)} in {mask.dtype}"
        )
    return ~mask if within is None else ~mask & within
