"""Wire form: the parts of a plane as contiguous uint8 or fp32 tensors with the sharded logical dimension first.

What a gather concatenates, for tensor parallelism and FSDP alike. Parts that cover the whole sharded dimension do not
travel: every shard holds the same one.
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


def to_wire(plane: Plane, dim: int) -> list[Tensor]:
    """The parts that shard along `dim`, in the order of the format's specs."""
    require_whole_blocks(plane, dim)
    wire = []
    for name, spec in plane.format.parts(*plane.shape).items():
        if spec.entries[dim] is not None:
            part = plane.parts[name]
            wire.append((part.t() if dim == 1 else part).contiguous())
    return wire


def from_wire(shard: Plane, dim: int, wire: Sequence[Tensor], count: int) -> Plane:
    """The plane of `count` shards from its gathered parts; parts that do not travel are those of `shard`."""
    gathered = iter(wire)
    parts = {}
    for name, spec in shard.format.parts(*shard.shape).items():
        if spec.entries[dim] is None:
            parts[name] = shard.parts[name]
            continue
        part = next(gathered)
        parts[name] = part.t() if dim == 1 else part
    rows, cols = shard.shape
    return Plane(shard.format, parts, (rows * count, cols) if dim == 0 else (rows, cols * count))


def gather(plane: Plane, dim: int, group: str, count: int) -> Plane:
    """The whole plane from the shards along `dim` that the ranks of `group` hold."""
    return from_wire(plane, dim, [all_gather(part, group) for part in to_wire(plane, dim)], count)
