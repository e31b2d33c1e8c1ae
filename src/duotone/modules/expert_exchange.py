"""Expert parallelism: tokens go to the ranks of their experts as codes and scales, results return unencoded."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from duotone.comm import ShardContext, all_to_all, group_size
from duotone.errors import UserError
from duotone.linear.row_counts import Rows
from duotone.pipeline.autograd import with_gradient
from duotone.tensor.context import QuantizeContext
from duotone.tensor.plane import Plane, Usage, sharded_parts, to_wire
from duotone.tensor.quantizer import Quantizer

Map = Callable[[Tensor], Tensor]


def move(rows: Tensor, forward_map: Map, backward_map: Map) -> Tensor:
    """`forward_map(rows)`, whose gradient is `backward_map` of the output's gradient."""
    return with_gradient(forward_map, lambda dy: (backward_map(dy),), rows)


@dataclass(frozen=True, eq=False)
class Exchange(Rows):
    """How many rows this rank sends to each rank and receives from each, and the order of those by local expert.

    Rows of one expert lie in the order of the ranks that they come from, as in one process that has all tokens.
    """

    group: str
    sent: tuple[int, ...]
    received: tuple[int, ...]
    splits: tuple[int, ...]
    counts: Tensor
    order: Tensor
    inverse: Tensor

    @staticmethod
    def of(counts: Tensor, group: str) -> "Exchange":
        """From the rows of each expert of all ranks, int64 (E,). The host waits once for the counts of all ranks."""
        size = group_size(group)
        theirs = all_to_all(counts.view(size, -1), [1] * size, [1] * size, group)
        sent, received = torch.stack([counts.view(size, -1), theirs]).tolist()
        experts = torch.arange(theirs.shape[1], device=counts.device).repeat(size)
        order = torch.argsort(experts.repeat_interleave(theirs.reshape(-1)), stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        sums = tuple(map(sum, sent)), tuple(map(sum, received))
        return Exchange(group, *sums, tuple(map(sum, zip(*received, strict=True))), theirs.sum(0), order, inverse)

    @property
    def experts(self) -> int:
        return len(self.splits)

    @property
    def total(self) -> int:
        return sum(self.received)

    def count(self) -> Tensor:
        return self.counts

    def send(self, rows: Tensor) -> Tensor:
        """Rows by expert of all ranks -> those that this rank's experts have, by expert."""
        return all_to_all(rows, self.sent, self.received, self.group)[self.order]

    def send_back(self, rows: Tensor) -> Tensor:
        return all_to_all(rows[self.inverse], self.received, self.sent, self.group)

    def dispatch(self, rows: Tensor, quantizer: Quantizer) -> Tensor:
        """Rows by expert -> the values that a rowwise encode leaves of them, on the ranks of their experts.

        All ranks agree on a scale that spans rows. The bytes of a row travel together. Gradients return unencoded.
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


def as_bytes(part: Tensor) -> Tensor:
    """(M, ...) -> the bytes of each row, uint8 (M, n)."""
    return part.unsqueeze(-1).flatten(1).view(torch.uint8)


def check_dispatch(quantizer: Quantizer, title: str) -> Quantizer:
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
        raise UserError(f"{title}: the quantizer of tokens that are sent {reason}; give dispatch_format=")
    return quantizer


def experts_of(rank: int, size: int, experts: int) -> range:
    """The experts of a rank. UserError if ranks would have different numbers of them."""
    if experts % size:
        raise UserError(f"{experts} experts do not divide over {size} ranks; make them a multiple of the ranks")
    return range(rank * experts // size, (rank + 1) * experts // size)
