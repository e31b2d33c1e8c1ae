"""Wire form: the parts of a plane as contiguous uint8 or fp32 tensors with the sharded logical dimension first.

This is what a gather concatenates, for tensor parallelism and FSDP alike. Parts that cover the whole sharded dimension
do not travel: every shard holds the same one.
"""

from collections.abc import Sequence

from torch import Tensor

from duotone.comm import all_gather
from duotone.errors import MissingPlaneError
from duotone.tensor.plane import Plane


def require_whole_blocks(plane: Plane, dim: int) -> None:
    """MissingPlaneError unless the shard ends on a block boundary along `dim`."""
    step = plane.format.alignment[dim]
    if plane.shape[dim] % step:
        raise MissingPlaneError(
            f"a shard of {plane.shape[dim]} along the {'rows' if dim == 0 else 'columns'} of a plane of "
            f"{plane.format.name} cuts its blocks of {step}; make shards multiples of {step}"
        )


def sharded(plane: Plane, dim: int) -> list[str]:
    """The names of the parts that shard along `dim`, in the order of the format."""
    return [name for name, spec in plane.format.parts(*plane.shape).items() if spec.entries[dim] is not None]


def to_wire(plane: Plane, dim: int) -> list[Tensor]:
    """The parts that shard along `dim`."""
    require_whole_blocks(plane, dim)
    parts = [plane.parts[name] for name in sharded(plane, dim)]
    return [(part.t() if dim == 1 else part).contiguous() for part in parts]


def from_wire(shard: Plane, dim: int, wire: Sequence[Tensor], count: int) -> Plane:
    """The plane of `count` shards from its gathered parts. Parts that do not travel are those of `shard`."""
    gathered = zip(sharded(shard, dim), wire, strict=True)
    parts = {**shard.parts, **{name: part.t() if dim == 1 else part for name, part in gathered}}
    rows, cols = shard.shape
    return Plane(shard.format, parts, (rows * count, cols) if dim == 0 else (rows, cols * count))


def gather(plane: Plane, dim: int, group: str, count: int) -> Plane:
    """The whole plane from the shards along `dim` that the ranks of `group` hold."""
    return from_wire(plane, dim, [all_gather(part, group) for part in to_wire(plane, dim)], count)
