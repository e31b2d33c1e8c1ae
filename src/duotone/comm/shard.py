"""ShardContext: that a tensor is one shard of a larger one, as a value."""

from dataclasses import dataclass

from torch import Tensor

from duotone.comm.collectives import all_reduce


@dataclass(frozen=True)
class ShardContext:
    """This rank holds one piece along `dim` (0 rows, 1 columns of the matrix), the others are on the ranks of `group`.

    An argument of a quantize, never part of a quantizer. Formats decide what has to agree: a scale that spans the
    sharded dimension reduces its amax, aligned blocks reduce nothing.
    """

    group: str
    dim: int = 0

    def max(self, amax: Tensor) -> Tensor:
        """The maximum over the ranks; a rank without elements contributes 0."""
        return all_reduce(amax, "max", self.group)

    def transposed(self) -> "ShardContext":
        return ShardContext(self.group, 1 - self.dim)
