"""Expert parallelism: tokens go to the ranks of their experts as codes and scales. Results return in high precision."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from duotone.comm import ShardContext, all_to_all, group_size
from duotone.custom_gradient import with_gradient
from duotone.errors import UserError
from duotone.linear.row_counts import Rows
from duotone.pipeline.titles import title
from duotone.tensor.context import QuantizeContext
from duotone.tensor.plane import Plane, Usage, sharded_parts, to_wire
from duotone.tensor.quantizer import Quantizer

Map = Callable[[Tensor], Tensor]


def move(rows: Tensor, forward_map: Map, backward_map: Map) -> Tensor:
    """`forward_map(rows)`, whose gradient is `backward_map` of the output's gradient."""
    return with_gradient(forward_map, lambda dy: (backward_map(dy),), rows)


@dataclass(frozen=True, eq=False)
class Exchange(Rows):
    """The number of rows that this rank sends to each rank and receives from each, and the order that sorts received
    rows by local expert.

    Rows of one expert lie in the order of the ranks that they come from, as in one process that has all tokens.
    """

    group: str
    sent: Sequence[int]
    received: Sequence[int]
    counts: Tensor
    order: Tensor
    inverse: Tensor
    rows_of_experts: tuple[int, ...] = ()
    """`splits`, if the host has read them."""
    places: Tensor | None = None
    """Under a capacity: the place of each row among the sent rows, or behind them if it is dropped. Other places are
    zero."""

    @staticmethod
    def of(counts: Tensor, group: str) -> "Exchange":
        """From the rows of each expert of all ranks, int64 (E,). The host waits once for the counts of all ranks."""
        size = group_size(group)
        incoming = all_to_all(counts.view(size, -1), [1] * size, [1] * size, group)
        sent, received = torch.stack([counts.view(size, -1), incoming]).tolist()
        sums = tuple(map(sum, sent)), tuple(map(sum, received))
        experts = torch.arange(incoming.shape[1], device=counts.device).repeat(size)
        owners = experts.repeat_interleave(incoming.reshape(-1), output_size=sum(sums[1]))
        rows_of_experts = tuple(map(sum, zip(*received, strict=True)))
        return Exchange(group, *sums, incoming.sum(0), *by_owner(owners), rows_of_experts)

    @staticmethod
    def within(capacity: int, counts: Tensor, rows: int, group: str, size: int) -> "Exchange":
        """Like `of`, for `rows` rows in all, of which each rank takes at most `capacity`. The host does not wait."""
        counts, equal = counts.view(size, -1), [capacity] * size
        of_ranks = counts.sum(1)
        ends, at = of_ranks.cumsum(0), torch.arange(rows, device=counts.device)
        rank = torch.searchsorted(ends, at, right=True)
        place = at - (ends - of_ranks)[rank]
        places = torch.where(place < capacity, rank * capacity + place, size * capacity)
        stay = counts.cumsum(1).clamp(max=capacity).diff(dim=1, prepend=counts.new_zeros(size, 1))
        incoming = all_to_all(stay, [1] * size, [1] * size, group)
        slots = torch.arange(capacity, device=counts.device).repeat(size, 1)
        owners = torch.searchsorted(incoming.cumsum(1), slots, right=True)  # slots without a row come after all experts
        return Exchange(group, equal, equal, incoming.sum(0), *by_owner(owners.flatten()), places=places)

    @property
    def experts(self) -> int:
        """The number of experts of this rank."""
        return self.counts.shape[0]

    @property
    def total(self) -> int:
        """The number of rows that this rank receives."""
        return sum(self.received)

    @cached_property
    def splits(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.rows_of_experts or tuple(self.count().tolist())

    @property
    def waits(self) -> bool:  # type: ignore[override]
        return self.places is None

    def count(self) -> Tensor:
        """The rows of each expert of this rank. The last expert also has the zeros at unused places."""
        if self.places is None:
            return self.counts
        ends = self.counts.cumsum(0)[:-1]
        return torch.diff(ends, prepend=ends.new_zeros(1), append=ends.new_full((1,), self.total))

    def send(self, rows: Tensor) -> Tensor:
        """Rows by expert of all ranks -> the rows of this rank's experts, by expert."""
        if self.places is not None:
            room = rows.new_zeros(sum(self.sent) + 1, *rows.shape[1:])
            rows = room.index_copy(0, self.places, rows)[:-1]
        return all_to_all(rows, self.sent, self.received, self.group)[self.order]

    def send_back(self, rows: Tensor) -> Tensor:
        """The reverse of `send`: rows return to their ranks, in the order before it. Dropped rows are zeros."""
        rows = all_to_all(rows[self.inverse], self.received, self.sent, self.group)
        if self.places is None:
            return rows
        return torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])[self.places]

    def dispatch(self, rows: Tensor, quantizer: Quantizer) -> Tensor:
        """Rows by expert -> their values after a rowwise encode, on the ranks of their experts.

        All ranks agree on a scale that spans rows. The bytes of a row travel together. Gradients return in high
        precision.
        """
        return move(rows, partial(self._send_codes, quantizer), self.send_back)

    def combine(self, y: Tensor) -> Tensor:
        """The results of local experts -> rows by expert of all ranks, where their tokens are."""
        return move(y, self.send_back, self.send)

    def _send_codes(self, quantizer: Quantizer, rows: Tensor) -> Tensor:
        plane = quantizer.encode(rows, Usage(True, False), QuantizeContext(shard=ShardContext(self.group))).rowwise
        assert plane is not None
        names, parts = sharded_parts(plane, 0), to_wire(plane, 0)
        wire = self.send(torch.cat([as_bytes(part) for part in parts], 1))
        pieces = wire.split([as_bytes(part).shape[1] for part in parts], 1)
        received = {
            name: piece.contiguous().view(part.dtype).view(-1, *part.shape[1:])
            for name, piece, part in zip(names, pieces, parts, strict=True)
        }
        return Plane(plane.format, {**plane.parts, **received}, (wire.shape[0], rows.shape[1])).dequantize(rows.dtype)


def by_owner(owners: Tensor) -> tuple[Tensor, Tensor]:
    """The order that sorts rows by owner, and its inverse."""
    order = torch.argsort(owners, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return order, inverse


def as_bytes(part: Tensor) -> Tensor:
    """(M, ...) -> the bytes of each row, uint8 (M, n)."""
    return part.unsqueeze(-1).flatten(1).view(torch.uint8)


def check_dispatch(quantizer: Quantizer, owner: object) -> Quantizer:
    """The quantizer, whose rowwise plane is sent. UserError if ranks could not encode their rows alone."""
    fmt = quantizer.rowwise
    reason = ""
    if fmt is None:
        reason = "has no rowwise format"
    elif fmt.is_delayed:
        reason = f"has {fmt.name}, whose scales belong to each expert"
    elif fmt.is_stochastic:
        reason = f"has {fmt.name}, which rounds stochastically"
    elif fmt.alignment[0] != 1:
        reason = f"has {fmt.name}, whose blocks span tokens"
    if reason:
        raise UserError(f"{title(owner)}: the quantizer of tokens that are sent {reason}; give dispatch_format=")
    return quantizer


def experts_of(rank: int, size: int, experts: int) -> range:
    """The experts of a rank. UserError if ranks would have different numbers of them."""
    if experts % size:
        raise UserError(f"{experts} experts do not divide over {size} ranks; make them a multiple of the ranks")
    return range(rank * experts // size, (rank + 1) * experts // size)
