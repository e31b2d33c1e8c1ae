"""Shards of which two planes are encoded: one collective agrees on the amaxes of both."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from duotone.comm import ShardContext
from duotone.formats import Format


def spans(fmt: Format, dim: int) -> bool:
    """Whether a scale of the format, which an encode decides, covers all of `dim`: 0 rows, 1 columns."""
    return not fmt.is_delayed and any(spec.entries[dim] is None for spec in fmt.parts(1, 1).values())


class Asked(Exception):
    """Ends an encode at the amax that shards would have to agree on."""

    def __init__(self, amax: Tensor) -> None:
        self.amax = amax


class AskingShard(ShardContext):
    """Raises `Asked` where shards have to agree."""

    def max(self, amax: Tensor) -> Tensor:
        raise Asked(amax)

    def transposed(self) -> ShardContext:
        return AskingShard(self.group, 1 - self.dim)


@dataclass(frozen=True)
class Pair:
    """What two planes of a shard agree on: at once, when the first asks. `second` measures the amax of the second."""

    shard: ShardContext
    second: Callable[[], Tensor]
    agreed: list[Tensor] = field(default_factory=list[Tensor])

    def max(self, amax: Tensor) -> Tensor:
        if self.agreed:
            return self.agreed.pop().view(amax.shape)
        count, later = amax.numel(), self.second()
        both = self.shard.max(torch.cat([amax.reshape(-1), later.reshape(-1)]))
        self.agreed.append(both[count:])
        return both[:count].view(amax.shape)


@dataclass(frozen=True)
class PairedShard(ShardContext):
    """A shard whose amaxes a `Pair` agrees on."""

    pair: Pair | None = None

    def max(self, amax: Tensor) -> Tensor:
        assert self.pair is not None
        return self.pair.max(amax)

    def transposed(self) -> ShardContext:
        return PairedShard(self.group, 1 - self.dim, self.pair)
