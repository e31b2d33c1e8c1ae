"""DTensors as inputs and outputs of layers, which compute with this rank's local tensors.

torch's own redistribution sums and gathers activations. Here only the placements of a call are decided.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from duotone.custom_gradient import with_gradient
from duotone.errors import UserError
from duotone.sharding.dtensors import is_distributed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ActivationLayout(NamedTuple):
    """Layout of an activation on a mesh of one dimension: its global shape, and its placement."""

    mesh: "DeviceMesh"
    placement: Placement
    shape: tuple[int, ...]
    of_pieces: bool = False
    """Whether the last dimension consists of pieces. A rank then has a part of each piece."""

    @property
    def dim(self) -> int | None:
        """The dimension that is cut into shards. None if there is none."""
        return self.placement.dim if isinstance(self.placement, Shard) else None

    @property
    def cuts_last(self) -> bool:
        """Whether the last dimension is cut."""
        return self.dim == self.last

    @property
    def last(self) -> int:
        """The number of the last dimension."""
        return len(self.shape) - 1

    @property
    def group(self) -> str:
        """The name of the process group of the mesh."""
        return self.mesh.get_group().group_name


def replicated(x: Tensor | None, layout: ActivationLayout, name: str) -> Tensor | None:
    """This rank's copy of a parameter that an op applies to each shard. UserError unless it is replicated there."""
    if x is None:
        return None
    if not is_distributed(x) or x.device_mesh != layout.mesh or placement_of(x, name) != Replicate():
        raise UserError(f"{name} has to be Replicate() on the mesh of the input, as SequenceParallel makes it")
    return to_local(x, Replicate() if layout.dim is None else Partial(), Replicate())


def placement_of(x: DTensor, name: str) -> Placement:
    """The one placement of a DTensor. UserError unless it is Replicate or Shard on a mesh of one dimension."""
    placements = x.placements
    if len(placements) != 1 or type(placements[0]) not in (Replicate, Shard):
        raise UserError(
            f"{name} is {placements} on a mesh of {len(placements)} dimensions; allowed is one dimension, with "
            "Replicate() or Shard(dim)"
        )
    return placements[0]


def whole(x: DTensor) -> DTensor:
    """The whole value, from the parts of all ranks, on each rank."""
    everywhere = [Replicate()] * x.device_mesh.ndim
    return DTensor.from_local(x.full_tensor().detach(), x.device_mesh, everywhere, run_check=False)


def to_local(x: DTensor, gradient: Placement, stored: Placement | None = None) -> Tensor:
    """This rank's tensor. Its gradient is a DTensor placed like `gradient`, or redistributed to `stored`."""
    mesh, shape, stride = x.device_mesh, x.shape, x.stride()

    def value(x: DTensor) -> Tensor:
        local = without_wait(x.to_local())
        return local.view_as(local)

    def gradients(dy: Tensor) -> tuple[DTensor]:
        dx = DTensor.from_local(dy, mesh, (gradient,), run_check=False, shape=shape, stride=stride)
        return (dx if stored in (None, gradient) else dx.redistribute(placements=(stored,)),)

    return with_gradient(value, gradients, x)


class LocalPieces:
    """The part of a rank of each piece of an output (*lead, width), side by side.

    No placement says how those of all ranks lie together, so this is no tensor. Styles of torch turn it into its local
    tensor.
    """

    def __init__(self, local: Tensor, name: str) -> None:
        self.local, self.name = local, name
        self.placements = (Shard(local.dim() - 1),)

    def redistribute(self, *, placements: Sequence[Placement], **options: object) -> Self:
        """Itself, for shards of the last dimension. UserError for other placements."""
        if tuple(placements) not in (self.placements, (Shard(-1),)):
            raise UserError(
                f"{self.name}: its output is pieces, of which each rank has a part, and cannot become {placements}; "
                "give its style output_layouts=Shard(-1)"
            )
        return self

    def to_local(self) -> Tensor:
        """(*lead, width of this rank)."""
        return self.local


def from_local(y: Tensor, layout: ActivationLayout) -> DTensor:
    """The DTensor whose local tensor on this rank is `y`."""
    shape, placement = torch.Size(layout.shape), layout.placement
    stride = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
    placements = (Replicate() if isinstance(placement, Partial) else placement,)

    def value(y: Tensor) -> DTensor:
        return DTensor.from_local(y, layout.mesh, (placement,), run_check=False, shape=shape, stride=stride)

    def gradients(dy: DTensor) -> tuple[Tensor]:
        dy = dy if dy.placements == placements else dy.redistribute(placements=placements)
        return (without_wait(dy.to_local()),)

    return with_gradient(value, gradients, y)


def without_wait(x: Tensor) -> Tensor:
    """The tensor itself, after a collective that still fills it: kernels read its address."""
    if not hasattr(x, "trigger_wait"):
        return x

    def value(x: Tensor) -> Tensor:
        result: Tensor = x.trigger_wait()  # type: ignore[attr-defined]
        return result.view_as(result)

    return with_gradient(value, lambda dy: (dy,), x)
