"""Batches of sequences for the ranks of a `cp_group`: padding, positions, and the part of a rank."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from duotone.attention.heads import check_layout, token_axis
from duotone.attention.masks import checked_edges
from duotone.compat.transformer_engine.context_parallel import Lengths, places, require_chunks
from duotone.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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

    "thd" tensors have sequences between `cu_seqlens_padded` along their first dimension, or behind a dimension of 1;
    "bshd" ones are (b, tokens, ...), "sbhd" ones (tokens, b, ...). `cp_group` None is the default group, or one rank if
    there is none. UserError if sequences do not divide into chunks, or tensors differ in tokens.
    """
    check_layout(qvk_format)
    batch = input_ids_padded, labels_padded, position_ids_padded
    group = cp_group or (dist.group.WORLD if dist.is_initialized() else None)
    ranks = 1 if group is None else group.size()
    if group is None or ranks == 1:
        return batch
    rank = group.rank() if cp_rank is None else cp_rank
    if not 0 <= rank < ranks:
        raise UserError(f"cp_rank is {rank}; give a rank of the group, from 0 to {ranks - 1}")
    counts = {x.shape[_axis(x, qvk_format)] for x in batch if x is not None}
    if len(counts) > 1:
        raise UserError(f"tokens, labels and positions are of equal lengths; got {sorted(counts)}")
    tokens = counts.pop()
    edges = edges_of(cu_seqlens_padded, tokens) if qvk_format == "thd" else torch.tensor([0, tokens])
    rows = rows_of_rank(edges, tokens, ranks, rank)
    return tuple(None if x is None else x.index_select(_axis(x, qvk_format), rows.to(x.device)) for x in batch)


def _axis(x: Tensor, layout: str) -> int:
    """The dimension of the tokens."""
    axis = int(x.dim() > 1 and x.shape[0] == 1) if layout == "thd" else token_axis(layout)
    if x.dim() <= axis:
        raise UserError(f"a batch in {layout} has tokens along dimension {axis}; got shape {tuple(x.shape)}")
    return axis


def edges_of(cu_seqlens: Lengths, tokens: int) -> Tensor:
    """The edges of packed sequences and of what lies behind the last, int64 (sequences + 2,)."""
    return F.pad(checked_edges(cu_seqlens, tokens).long(), (0, 1), value=tokens)


def rows_of_rank(edges: Tensor, tokens: int, ranks: int, rank: int) -> Tensor:
    """The numbers of a rank's tokens, int64 (tokens / ranks,). The last edge is the number of `tokens`."""
    require_chunks(edges, ranks)
    sequence, position = places(edges, tokens // ranks, rank, ranks)
    return edges[sequence] + position


def thd_get_partitioned_indices(
    cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int, *_: object
) -> Tensor:
    """The numbers of a rank's tokens of packed sequences, int32 (total_tokens / world_size,)."""
    return rows_of_rank(edges_of(cu_seqlens, total_tokens), total_tokens, world_size, rank).to(torch.int32)


def pad_thd_sequences_for_cp(
    input_ids: Tensor,
    labels: Tensor,
    cu_seqlens: Tensor,
    divisibility_factor: int,
    padding_token_id: int = 0,
    padding_label_id: int = -100,
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed tokens and labels, (tokens,) or (1, tokens) -> the same and `cu_seqlens`, with padding behind each
    sequence up to a multiple of a factor. Tokens behind the last edge are left out."""
    edges = padded_edges(cu_seqlens, divisibility_factor).long()
    first = checked_edges(cu_seqlens, input_ids.numel()).long()
    index = torch.arange(int(first[-1]), device=cu_seqlens.device)
    sequence = torch.searchsorted(first[1:], index, right=True)
    rows = index - first[sequence] + edges[sequence]
    padded = []
    for x, padding in ((input_ids, padding_token_id), (labels, padding_label_id)):
        if x.numel() != max(x.shape) or x.numel() < len(rows):
            raise UserError(f"packed tokens and labels are (tokens,) or (1, tokens), all of them; got {tuple(x.shape)}")
        room = x.new_full((int(edges[-1]),), padding)
        padded.append(room.index_copy(0, rows.to(x.device), x.flatten()[: len(rows)]))
    return padded[0], padded[1], edges.to(cu_seqlens.dtype)


def generate_positional_ids_for_cp(
    cu_seqlens: Tensor, divisibility_factor: int, dtype: torch.dtype = torch.long
) -> Tensor:
    """Positions (tokens,) that start from 0 in each sequence and go on through its padding, up to a multiple."""
    edges = padded_edges(cu_seqlens, divisibility_factor).long()
    rows = torch.arange(int(edges[-1]), device=edges.device)
    return (rows - edges[torch.searchsorted(edges[1:], rows, right=True)]).to(dtype)


def padded_edges(cu_seqlens: Tensor, factor: int) -> Tensor:
    """`cu_seqlens` of sequences that are padded to a multiple of a factor. UserError for a factor below 1."""
    if factor < 1:
        raise UserError(f"divisibility_factor is {factor}; give a number from 1 on, such as 2 * ranks")
    lengths = -(-cu_seqlens.diff() // factor) * factor
    return F.pad(lengths.cumsum(0), (1, 0)).to(cu_seqlens.dtype)
