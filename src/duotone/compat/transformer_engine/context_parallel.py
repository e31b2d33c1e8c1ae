"""Sequences over the ranks of a `cp_group`, and packed sequences with padding between them.

Each sequence lies in 2 N equal chunks over N ranks: rank r has chunk r, then chunk 2 N - 1 - r. For attention the ranks
exchange heads for tokens. Each of them then has all tokens of some heads, and attention runs as on one rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.attention import rotary
from duotone.attention.heads import token_axis
from duotone.attention.masks import checked_edges
from duotone.attention.rotary import Angles, Rotation
from duotone.comm.collectives import all_to_all, group_rank, group_size
from duotone.custom_gradient import with_gradient
from duotone.errors import UserError

Lengths = Tensor | None
Map = Callable[[Tensor], Tensor]


class Padded(NamedTuple):
    """`cu_seqlens` of packed sequences with padding behind each of them, and the edges of their places."""

    lengths: Tensor
    edges: Tensor


def join_padding(named: dict[str, Any], layout: str) -> None:
    """Put a `Padded` in the place of each `cu_seqlens` of a call that comes with padding. UserError for one alone.

    Keys have the lengths of queries, unless they have their own.
    """
    lengths = named.get("cu_seqlens_q")
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        edges = named.pop(f"{name}_padded", None)
        lengths = lengths if named.get(name) is None else named[name]
        if edges is not None and layout == "thd":
            if lengths is None:
                raise UserError(f"{name}_padded comes without {name}; give both")
            named[name] = Padded(lengths, edges)
    both = [one for one in (named.get("cu_seqlens_q"), named.get("cu_seqlens_kv")) if one is not None]
    if len({isinstance(one, Padded) for one in both}) > 1:
        raise UserError("one of cu_seqlens_q_padded and cu_seqlens_kv_padded is missing; give both, or neither")


@dataclass(frozen=True)
class TokenOrder:
    """The tokens of all ranks, in the order in which attention takes them."""

    order: Tensor
    """int64 (tokens,): the number of each token, where those of one rank follow those of the rank before it."""
    group: str
    """Of the ranks, or "" for one rank."""

    def collect(self, heads: Tensor, layout: str) -> Tensor:
        """Heads of this rank's tokens in a layout -> this rank's share of the heads, of all tokens."""
        return moved(heads.movedim(token_axis(layout), 0), self._collect, self._spread).movedim(0, token_axis(layout))

    def spread(self, heads: Tensor, layout: str) -> Tensor:
        """The reverse of `collect`."""
        return moved(heads.movedim(token_axis(layout), 0), self._spread, self._collect).movedim(0, token_axis(layout))

    def _collect(self, heads: Tensor) -> Tensor:
        if self.group:
            ranks = group_size(self.group)
            blocks = torch.unflatten(heads, -2, (ranks, heads.shape[-2] // ranks)).movedim(-3, 0)
            heads = all_to_all(blocks, [1] * ranks, [1] * ranks, self.group).flatten(0, 1)
        return heads.index_select(0, self.order)

    def _spread(self, heads: Tensor) -> Tensor:
        heads = torch.empty_like(heads).index_copy(0, self.order, heads)
        if not self.group:
            return heads
        ranks = group_size(self.group)
        blocks = torch.unflatten(heads, 0, (ranks, heads.shape[0] // ranks))
        return all_to_all(blocks, [1] * ranks, [1] * ranks, self.group).movedim(0, -3).flatten(-3, -2)


def moved(x: Tensor, move: Map, back: Map) -> Tensor:
    """`move(x)`, whose gradient is `back` of the output's gradient, and so on for gradients of gradients."""
    return with_gradient(move, lambda gradient: (moved(gradient, back, move),), x)


@dataclass(frozen=True)
class Sequences:
    """How the sequences of a call lie. `edges` delimit them with their padding, for all ranks, int64 (sequences + 2,).

    The last sequence is what lies behind the others, and may be empty.
    """

    edges: Tensor
    tokens: int
    """Of one rank."""
    rank: int
    ranks: int
    lengths: Lengths
    """`cu_seqlens` without padding, if there is padding."""

    @staticmethod
    def of(x: Tensor, cu_seqlens: Padded | Lengths, layout: str, rank: int, ranks: int) -> "Sequences":
        """Those of a rank's heads in a layout. UserError if `cu_seqlens` do not fit or chunks would be unequal."""
        tokens, lengths = x.shape[token_axis(layout)], None
        edges, every = torch.zeros(1, dtype=torch.int64, device=x.device), tokens * ranks
        if layout == "thd":
            if isinstance(cu_seqlens, Padded):
                cu_seqlens, lengths = cu_seqlens.edges, checked_edges(cu_seqlens.lengths, every).long()
            edges = checked_edges(cu_seqlens, every).long()
        for one in (edges, lengths):
            if one is not None and one.device != x.device:
                raise UserError(f"cu_seqlens are on {one.device}, and heads on {x.device}; move them")
        if lengths is not None:
            if lengths.shape != edges.shape:
                raise UserError(f"cu_seqlens and padded ones are of equal lengths; got {len(lengths)} and {len(edges)}")
            require((lengths.diff() <= edges.diff()).all(), "a sequence is longer than its place", lengths, edges)
        edges = torch.cat((edges, edges.new_full((1,), every)))
        require_chunks(edges, ranks)
        return Sequences(edges, tokens, rank, ranks, lengths)

    def order(self, group: str) -> TokenOrder:
        """Sequence after sequence. Padding comes behind all sequences. `group`: of the ranks, "" for one rank."""
        each = [places(self.edges, self.tokens, rank, self.ranks) for rank in range(self.ranks)]
        sequence, position = (torch.cat(part) for part in zip(*each, strict=True))
        rows = self.edges[sequence] + position
        if self.lengths is not None:
            real = position < F.pad(self.lengths.diff(), (0, 1))[sequence]
            rows = torch.where(real, rows, rows + self.edges[-1])
        return TokenOrder(rows.argsort(), group)

    def angles(self, angles: Angles) -> Angles:
        """The row of each of this rank's tokens. UserError if a sequence has more tokens than there are rows."""
        rows = (angles.cos if isinstance(angles, Rotation) else angles).shape[0]
        longest = self.edges.diff()[:-1].max() if len(self.edges) > 2 else self.edges[-1]
        message = f"rotary angles are for {rows} positions; make as many as the longest sequence has tokens"
        require(longest <= rows, message, self.edges)
        position = places(self.edges, self.tokens, self.rank, self.ranks)[1].clamp(max=rows - 1)
        if isinstance(angles, Rotation):
            return Rotation(*(table[position] for table in angles))
        return angles[position]

    def single(self, layout: str) -> Lengths:
        """The `cu_seqlens` that turn the tokens of this rank by the rows of `angles`. None if they are not packed."""
        # No copy from the host: it would wait for the device.
        return torch.arange(2, device=self.edges.device) * self.tokens if layout == "thd" else None


def place_of(group: str) -> tuple[int, int]:
    """This process's rank in a group and the number of ranks; (0, 1) for ""."""
    return (group_rank(group), group_size(group)) if group else (0, 1)


def places(edges: Tensor, tokens: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """The sequence of each token of a rank and its position in it, both int64 (tokens,)."""
    index, first = torch.arange(tokens, device=edges.device), edges // ranks
    sequence = torch.searchsorted(first[1:], index, right=True)
    chunk, offset = edges.diff()[sequence] // (2 * ranks), index - first[sequence]
    if ranks == 1:
        return sequence, offset
    return sequence, offset + chunk * torch.where(offset < chunk, rank, 2 * ranks - 2 - rank)


def require(condition: Tensor, message: str, *edges: Tensor) -> None:
    """UserError unless bool () is true. On a GPU and in graphs the assertion comes later, from the device."""
    if condition.is_cpu and not torch.compiler.is_dynamo_compiling():
        if not condition:
            shown = " and ".join(str(each.tolist()) for each in edges)
            raise UserError(f"{message}; got edges {shown}")
    else:
        torch._assert_async(condition, message)  # type: ignore[reportPrivateImportUsage]


def require_chunks(edges: Tensor, ranks: int) -> None:
    """UserError unless sequences have 2 chunks for each rank."""
    if ranks > 1:
        message = f"each sequence over {ranks} ranks, and what lies behind the last, needs a multiple of {2 * ranks}"
        require((edges % (2 * ranks) == 0).all(), f"{message} tokens: pad it", edges)


def require_shares(heads: int, groups: int, group: str) -> None:
    """UserError unless the ranks of a group, "" for one rank, divide the heads."""
    if group and groups % group_size(group):
        raise UserError(
            f"{group_size(group)} ranks of a cp_group take {heads} heads of queries and {groups} of keys, which do not "
            "divide: choose a cp_group that divides num_gqa_groups over tp_size"
        )


def apply_rotary_pos_emb(  # noqa: PLR0913 (Transformer Engine's vocabulary)
    t: Tensor,
    freqs: Angles,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Lengths = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """`duotone.apply_rotary_pos_emb` for the tokens of a rank, whose `freqs` and `cu_seqlens` are those of all ranks.

    UserError for `start_positions` and `interleaved`. `fused` changes nothing.
    """
    if start_positions is not None or interleaved:
        name = "interleaved" if interleaved else "start_positions"
        raise UserError(f"te.apply_rotary_pos_emb has no {name} in Duotone; give the rows of freqs for t, in halves")
    if cp_size > 1:
        sequences = Sequences.of(t, cu_seqlens, tensor_format, cp_rank, cp_size)
        freqs, cu_seqlens = sequences.angles(freqs), sequences.single(tensor_format)
    return rotary.apply_rotary_pos_emb(t, freqs, tensor_format, cu_seqlens)
