"""Sequences over the ranks of a `cp_group`, and packed sequences with padding between them.

Each sequence lies in 2 N equal chunks over N ranks: rank r has chunk r, then chunk 2 N - 1 - r. For attention the ranks
exchange heads for tokens. Each of them then has all tokens of some heads, and attention runs as on one rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.attention.heads import check_layout, token_axis
from duotone.attention.rotary import Angles, Rotation
from duotone.comm.collectives import all_to_all, group_rank, group_size
from duotone.errors import UserError
from duotone.pipeline.autograd import with_gradient

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Lengths = Tensor | None
Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TokenOrder:
    """The tokens of all ranks, in the order in which attention takes them."""

    order: Tensor
    """int64 (tokens,): the number of each token, where those of one rank follow those of the rank before it."""
    group: str
    """Of the ranks, or "" for one rank."""

    def collect(self, heads: Tensor, layout: str) -> Tensor:
        """Heads of this rank's tokens in a layout -> this rank's share of the heads, of all tokens."""
        return self._along(heads, layout, self._collect, self._spread)

    def spread(self, heads: Tensor, layout: str) -> Tensor:
        """The reverse of `collect`."""
        return self._along(heads, layout, self._spread, self._collect)

    def _along(self, heads: Tensor, layout: str, move: Map, back: Map) -> Tensor:
        axis = token_axis(layout)
        moved = with_gradient(move, lambda gradient: (back(gradient),), heads.movedim(axis, 0))
        return moved.movedim(0, axis)

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


@dataclass(frozen=True)
class Sequences:
    """How the sequences of a call lie. `edges` delimit them with their padding, for all ranks, int64 (sequences + 1,).

    The last sequence is what lies behind the others, and may be empty.
    """

    edges: Tensor
    tokens: int
    """Of one rank."""
    group: str

    @staticmethod
    def of(tokens: int, device: torch.device, edges: Lengths, group: str) -> "Sequences":
        """`edges` as integers (sequences + 1,), None for one sequence. UserError if chunks would be unequal."""
        ranks = group_size(group) if group else 1
        whole = torch.tensor([tokens * ranks], device=device)
        edges = torch.cat((whole - whole if edges is None else edges.long(), whole))
        require_chunks(edges, ranks)
        return Sequences(edges, tokens, group)

    def places(self) -> tuple[Tensor, Tensor]:
        """Of this rank's tokens, int64 (tokens,): the sequence, and the position in it."""
        rank, ranks = (group_rank(self.group), group_size(self.group)) if self.group else (0, 1)
        return places(self.edges, self.tokens, rank, ranks)

    def order(self, lengths: Lengths) -> TokenOrder:
        """Sequence after sequence. With `lengths`, as edges without padding, padding comes behind all sequences."""
        ranks = group_size(self.group) if self.group else 1
        each = [places(self.edges, self.tokens, rank, ranks) for rank in range(ranks)]
        sequence, position = (torch.cat(part) for part in zip(*each, strict=True))
        rows = self.edges[sequence] + position
        if lengths is not None:
            real = position < F.pad(lengths.long().diff(), (0, 1))[sequence]
            rows = torch.where(real, rows, rows + self.edges[-1])
        return TokenOrder(rows.argsort(), self.group)


def places(edges: Tensor, tokens: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """The sequence of each token of a rank and its position in it, both int64 (tokens,)."""
    index, first = torch.arange(tokens, device=edges.device), edges // ranks
    sequence = torch.searchsorted(first[1:], index, right=True)
    chunk, offset = edges.diff()[sequence] // (2 * ranks), index - first[sequence]
    if ranks == 1:
        return sequence, offset
    return sequence, offset + chunk * torch.where(offset < chunk, rank, 2 * ranks - 2 - rank)


def require_chunks(edges: Tensor, ranks: int) -> None:
    """UserError unless sequences have 2 chunks for each rank. On a GPU the assertion comes from the device, later."""
    if ranks == 1:
        return
    fits = (edges % (2 * ranks) == 0).all()
    message = f"each sequence over {ranks} ranks needs a multiple of {2 * ranks} tokens; pad it"
    if edges.is_cpu and not torch.compiler.is_dynamo_compiling():
        if not fits:
            raise UserError(f"{message}; edges are {edges.tolist()}")
    else:
        torch._assert_async(fits, message)  # type: ignore[reportPrivateImportUsage]


def require_shares(heads: int, groups: int, group: str) -> None:
    """UserError unless the ranks of a group, "" for one rank, divide the heads."""
    if group and groups % group_size(group):
        raise UserError(
            f"{heads} heads, {groups} groups and {group_size(group)} ranks of a cp_group do not divide: each rank "
            "takes a share of the heads; choose a cp_group that divides num_gqa_groups"
        )


def angles_at(angles: Angles, position: Tensor) -> Angles:
    """The row of the angles for each position."""
    if isinstance(angles, Rotation):
        return Rotation(*(table[position] for table in angles))
    return angles[position]


def get_batch_on_this_cp_rank(
    cu_seqlens_padded: Lengths,
    input_ids_padded: Tensor,
    labels_padded: Tensor,
    position_ids_padded: Tensor | None = None,
    cp_group: "ProcessGroup | None" = None,
    qvk_format: str = "thd",
    cp_rank: int | None = None,
) -> tuple[Tensor | None, ...]:
    """The tokens, labels and positions of this rank, or of `cp_rank`, from those of all ranks.

    "thd" tensors are (tokens,) or (1, tokens), in sequences between `cu_seqlens_padded`; "bshd" ones are
    (b, tokens, ...), "sbhd" ones (tokens, b, ...). UserError if sequences do not divide into chunks.
    """
    check_layout(qvk_format)
    batch = input_ids_padded, labels_padded, position_ids_padded
    ranks = 1 if cp_group is None else cp_group.size()
    if cp_group is None or ranks == 1:
        return batch
    axis = input_ids_padded.dim() - 1 if qvk_format == "thd" else token_axis(qvk_format)
    tokens, device = input_ids_padded.shape[axis], input_ids_padded.device
    edges = torch.tensor([0, tokens], device=device)
    if qvk_format == "thd" and cu_seqlens_padded is not None:
        edges = torch.cat((cu_seqlens_padded.to(device).long(), edges[1:]))
    require_chunks(edges, ranks)
    sequence, position = places(edges, tokens // ranks, cp_group.rank() if cp_rank is None else cp_rank, ranks)
    rows = edges[sequence] + position
    return tuple(None if x is None else x.index_select(axis, rows.to(x.device)) for x in batch)


def pad_thd_sequences_for_cp(
    input_ids: Tensor,
    labels: Tensor,
    cu_seqlens: Tensor,
    divisibility_factor: int,
    padding_token_id: int = 0,
    padding_label_id: int = -100,
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed tokens and labels, (tokens,) or (1, tokens) -> the same and `cu_seqlens`, with padding behind each
    sequence up to a multiple of a factor."""
    edges = padded_edges(cu_seqlens, divisibility_factor)
    lengths = cu_seqlens.long().diff()
    rows = torch.arange(int(lengths.sum()), device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].long(), rows, right=True)
    rows = rows - cu_seqlens.long()[sequence] + edges.long()[sequence]
    padded = []
    for x, padding in ((input_ids, padding_token_id), (labels, padding_label_id)):
        room = x.new_full((int(edges[-1]),), padding)
        padded.append(room.index_copy(0, rows.to(x.device), x.flatten()))
    return padded[0], padded[1], edges


def generate_positional_ids_for_cp(
    cu_seqlens: Tensor, divisibility_factor: int, dtype: torch.dtype = torch.long
) -> Tensor:
    """Positions (tokens,) that start from 0 in each sequence and go on through its padding, up to a multiple."""
    edges = padded_edges(cu_seqlens, divisibility_factor).long()
    rows = torch.arange(int(edges[-1]), device=edges.device)
    return (rows - edges[torch.searchsorted(edges[1:], rows, right=True)]).to(dtype)


def padded_edges(cu_seqlens: Tensor, factor: int) -> Tensor:
    """`cu_seqlens` of sequences that are padded to a multiple of a factor."""
    lengths = -(-cu_seqlens.diff() // factor) * factor
    return F.pad(lengths.cumsum(0), (1, 0)).to(cu_seqlens.dtype)
