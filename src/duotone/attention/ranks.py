"""Ranks that share a sequence, by torch's context_parallel: products of codes see the keys of all ranks.

Each rank multiplies its queries by all keys and values, which are gathered: as codes if the ranks agree on one scale.
Gradients of keys and values are summed over the ranks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from duotone.comm.collectives import all_gather, all_reduce, group_rank, group_size, reduce_scatter
from duotone.numbered import constant_in_traces
from duotone.state.torch_private import CONTEXT_PARALLEL
from duotone.tensor.plane import Plane, sharded_parts


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, ranks: "Ranks") -> Tensor:
        ctx.ranks = ranks  # type: ignore[attr-defined]
        return all_reduce(x, "sum", ranks.group) / ranks.size

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.mean(gradient), None  # type: ignore[attr-defined]


class Ranks(NamedTuple):
    """A group by name. A balanced rank has two chunks of the sequence, equally far from its start and its end."""

    name: str
    """Of this value, for graphs: `named` gives it back."""

    group: str
    is_balanced: bool
    size: int

    @staticmethod
    def now() -> "Ranks | None":
        """The ranks of the context that is entered, or None."""
        return _named(CONTEXT_PARALLEL.order)

    @staticmethod
    def named(name: str) -> "Ranks | None":
        """The ranks of a `name`, None for ""."""
        order, _, group = name.partition(" ")
        return Ranks(name, group, order == "balanced", group_size(group)) if name else None

    def gathered(self, x: Tensor, axis: int) -> Tensor:
        """This rank's tokens along `axis` -> those of all ranks, in the order of the sequence."""
        raw = x.view(torch.uint8) if x.itemsize == 1 else x
        each = all_gather(raw.movedim(axis, 0), self.group)
        if self.is_balanced:
            first, second = torch.unflatten(each, 0, (self.size, 2, -1)).unbind(1)
            each = torch.cat((first, second.flip(0))).flatten(0, 1)
        return each.movedim(0, axis).contiguous().view(x.dtype)

    def summed(self, x: Tensor, axis: int) -> Tensor:
        """The values of each rank for all tokens along `axis` -> their sum for this rank's tokens. Sums are fp32."""
        each = x.float().movedim(axis, 0)
        if self.is_balanced:
            first, second = torch.unflatten(each, 0, (2 * self.size, -1)).chunk(2)
            each = torch.stack((first, second.flip(0)), 1).flatten(0, 2)
        return reduce_scatter(each, self.group).movedim(0, axis).to(x.dtype)

    def mean(self, x: Tensor) -> Tensor:
        """The mean over the ranks, with its gradient."""
        return _Mean.apply(x, self)  # type: ignore[no-any-return]

    def gathered_plane(self, plane: Plane, direction: str, batch: int) -> Plane:
        """The plane of all tokens under one scale, from that of this rank, in a direction of `HeadOperand`."""
        dim = int(direction == "columnwise")
        parts, shape = dict(plane.parts), list(plane.shape)
        for name in sharded_parts(plane, dim):
            part = torch.unflatten(parts[name], dim, (batch, -1))
            parts[name] = self.gathered(part, dim + 1).flatten(dim, dim + 1)
        shape[dim] *= self.size
        return Plane(plane.format, parts, (shape[0], shape[1]))

    def places(self, tokens: int, device: torch.device) -> Tensor:
        """The positions of this rank's tokens in the sequence, int32 and ascending."""
        rank, index = group_rank(self.group), torch.arange(tokens, dtype=torch.int32, device=device)
        if not self.is_balanced:
            return rank * tokens + index
        half = tokens // 2
        return torch.where(index < half, rank * half, (2 * self.size - 2 - rank) * half) + index

    def local_spans(self, spans: Tensor, tokens: int) -> Tensor:
        """`spans` of all queries and keys of the sequence -> those of this rank's queries and all keys."""
        place, queries = self.places(tokens, spans.device), tokens * self.size
        of_keys = torch.searchsorted(place, spans[..., queries:].contiguous(), out_int32=True)
        return torch.cat((spans[..., :queries][..., place], of_keys), -1)

    def largest(self, numbers: Sequence[int], device: str) -> list[int]:
        """The largest of each number over the ranks. All ranks have to call it. The host waits for it."""
        return all_reduce(torch.tensor(numbers, device=device), "max", self.group).tolist()  # type: ignore[no-any-return]


@constant_in_traces
def _named(name: str) -> Ranks | None:
    return Ranks.named(name)
