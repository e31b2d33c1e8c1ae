"""Shards that agree on several amaxes in one collective: those of two planes, or of many tensors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from duotone.comm import ShardContext
from duotone.formats import Format


def spans(fmt: Format, dim: int) -> bool:
    """Whether a scale of the format, which an encode decides, covers all of `dim`: 0 rows, 1 columns."""
    return not fmt.is_delayed and any(spec.entries[dim] is None for spec in fmt.parts(1, 1).values())


class AmaxNeeded(Exception):
    """Ends an encode at the amax that shards would have to agree on."""

    def __init__(self, amax: Tensor) -> None:
        self.amax = amax


class AskingShard(ShardContext):
    """Raises `AmaxNeeded` when shards have to agree."""

    def max(self, amax: Tensor) -> Tensor:
        raise AmaxNeeded(amax)


@dataclass(frozen=True)
class AnsweredShard(ShardContext):
    """A shard that has the answers for the first amaxes that an encode asks for. Each later one takes a collective."""

    answers: list[Tensor] = field(default_factory=list[Tensor])

    @property
    def agreed(self) -> Tensor | None:
        return self.answers[0] if self.answers else None

    def max(self, amax: Tensor) -> Tensor:
        return self.answers.pop(0).view(amax.shape) if self.answers else super().max(amax)


def ask(encode: Callable[[ShardContext], object], dim: int = 0) -> Tensor | None:
    """The first amax of all shards along `dim` that an encode needs. None if it needs none."""
    try:
        encode(AskingShard("", dim))
    except AmaxNeeded as needed:
        return needed.amax
    return None


ALIGNED = 4
"""Kernels want the address of an amax to be a multiple of this many fp32."""


def agree(groups: Sequence[str], amaxes: Sequence[Tensor]) -> list[Tensor]:
    """The maximum of each fp32 amax over the ranks of its group: one collective for each group."""
    agreed: list[Tensor] = list(amaxes)
    for group in dict.fromkeys(groups):
        indices = [at for at, name in enumerate(groups) if name == group]
        sizes = [-(-amaxes[at].numel() // ALIGNED) * ALIGNED for at in indices]
        flat = amaxes[indices[0]].new_zeros(sum(sizes))
        places = [place[: amaxes[at].numel()] for at, place in zip(indices, torch.split(flat, sizes), strict=True)]
        torch._foreach_copy_(places, [amaxes[at].reshape(-1) for at in indices])  # type: ignore
        for at, place in zip(indices, torch.split(ShardContext(group).max(flat), sizes), strict=True):
            agreed[at] = place[: amaxes[at].numel()]
    return agreed


@dataclass(frozen=True, kw_only=True)
class PairedShard(ShardContext):
    """A shard of which two planes agree on their amaxes at once, when the first asks.

    `second` measures the amax of the second plane.
    """

    shard: ShardContext
    second: Callable[[], Tensor]
    amaxes: list[Tensor] = field(default_factory=list[Tensor])

    def max(self, amax: Tensor) -> Tensor:
        if self.amaxes:
            return self.amaxes.pop().view(amax.shape)
        count, later = amax.numel(), self.second()
        both = self.shard.max(torch.cat([amax.reshape(-1), later.reshape(-1)]))
        self.amaxes.append(both[count:])
        return both[:count].view(amax.shape)
