"""Ranks that share a sequence, by torch's context_parallel: products of codes see the keys of all ranks.

Each rank multiplies its own queries with all keys and values, which are gathered, as codes where one scale is agreed
on. Gradients of keys and values are summed over the ranks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from duotone.attention.masks import Window
from duotone.comm.collectives import all_gather, all_reduce, group_rank, group_size, reduce_scatter
from duotone.state.torch_private import context_parallel
from duotone.tensor.plane import Plane, sharded_parts


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, ranks: "Ranks") -> Tensor:
        ctx.ranks = ranks  # type: ignore[attr-defined]
        return all_reduce(x, "sum", ranks.group) / ranks.count

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.mean(gradient), None  # type: ignore[attr-defined]


class Ranks(NamedTuple):
    """A group by name. Balanced ranks have two chunks of the sequence: one counts from its start, one from its end."""

    group: str
    is_balanced: bool

    @staticmethod
    def now() -> "Ranks | None":
        """The ranks of the context that is entered, or None."""
        context = context_parallel()
        return None if context is None else Ranks(*context)

    @property
    def count(self) -> int:
        return group_size(self.group)

    def gathered(self, x: Tensor, axis: int) -> Tensor:
        """This rank's tokens along `axis` -> those of all ranks, in the order of the sequence."""
        raw = x.view(torch.uint8) if x.itemsize == 1 else x
        each = all_gather(raw.movedim(axis, 0), self.group)
        if self.is_balanced:
            first, second = each.unflatten(0, (self.count, 2, -1)).unbind(1)
            each = torch.cat((first, second.flip(0))).flatten(0, 1)
        return each.movedim(0, axis).contiguous().view(x.dtype)

    def summed(self, x: Tensor, axis: int) -> Tensor:
        """What each rank has for all tokens along `axis` -> the sum for this rank's tokens. Sums are fp32."""
        each = x.float().movedim(axis, 0)
        if self.is_balanced:
            first, second = each.unflatten(0, (2 * self.count, -1)).chunk(2)
            each = torch.stack((first, second.flip(0)), 1).flatten(0, 2)
        return reduce_scatter(each, self.group).movedim(0, axis).to(x.dtype)

    def mean(self, x: Tensor) -> Tensor:
        """The mean over the ranks, with its gradient."""
        return _Mean.apply(x, self)  # type: ignore[no-any-return]

    def gathered_plane(self, plane: Plane, direction: str, batch: int) -> Plane:
        """The plane of all tokens from that of this rank's, in a direction of `HeadOperand`, under one scale."""
        dim = int(direction == "columnwise")
        parts, shape = dict(plane.parts), list(plane.shape)
        for name in sharded_parts(plane, dim):
            part = parts[name].unflatten(dim, (batch, -1))
            parts[name] = self.gathered(part, dim + 1).flatten(dim, dim + 1)
        shape[dim] *= self.count
        return Plane(plane.format, parts, (shape[0], shape[1]))

    def spans(self, window: Window, tokens: int, device: torch.device) -> Tensor:
        """`spans` of a window, (-1, 0) for causal attention, for this rank's tokens as queries and all as keys."""
        count, rank, index = self.count, group_rank(self.group), torch.arange(tokens, device=device)
        place = rank * tokens + index
        if self.is_balanced:
            half = tokens // 2
            place = torch.where(index < half, rank * half, (2 * count - 2 - rank) * half) + index
        keys, (left, right) = torch.arange(count * tokens, device=device), window
        far = count * tokens
        before, behind = far if left < 0 else left, far if right < 0 else right
        of_queries = torch.stack(((place - before).clamp(min=0), (place + behind + 1).clamp(max=far)))
        first, last = torch.searchsorted(place, keys - behind), torch.searchsorted(place, keys + before, right=True)
        return torch.cat((of_queries, torch.stack((first, last))), -1)[None].to(torch.int32)
