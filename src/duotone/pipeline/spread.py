"""DTensors in a pipeline: ops run on this rank's local tensors, and the output is a DTensor again.

torch's own redistribution sums and gathers activations. Here only the placements of a call are decided.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from duotone.errors import UserError
from duotone.pipeline import op as pipeline
from duotone.pipeline.autograd import with_gradient
from duotone.pipeline.op import Op, is_distributed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Spread(NamedTuple):
    """How an activation of this global shape lies on the ranks of a mesh of one dimension."""

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


def replicated(x: Tensor | None, spread: Spread, name: str) -> Tensor | None:
    """This rank's copy of a parameter that an op applies to each shard. UserError unless it is replicated there."""
    if x is None:
        return None
    if not is_distributed(x) or x.device_mesh != spread.mesh or placement_of(x, name) != Replicate():
        raise UserError(f"{name} has to be Replicate() on the mesh of the input, as SequenceParallel makes it")
    return to_local(x, Replicate() if spread.dim is None else Partial(), Replicate())


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


def run_spread(
    ops: Sequence[Op],
    x: "DTensor | LocalPieces",
    extra: Sequence[object],
    first: bool | Tensor | None,
    owner: object,
) -> "DTensor | LocalPieces":
    """`run` for a DTensor: the ops run one by one on local tensors."""
    name = getattr(owner, "module_name", "") or type(owner).__name__
    if extra:
        raise UserError(f"{name} takes further inputs as local tensors beside a local tensor: pass to_local() of each")
    for one in ops:
        if isinstance(x, LocalPieces):
            raise UserError(f"{name}: an op takes no output of pieces that lie on ranks; give it to_local() of them")
        spread = Spread(x.device_mesh, placement_of(x, f"the input of {name}"), tuple(x.shape))
        output = one.spread(spread)
        # If columns are cut into shards, gradients of a replicated input are summed where the input was replicated.
        cut = spread.dim is None and output.dim is not None
        local = to_local(x, Partial() if cut else spread.placement)
        if output.dim and spread.cuts_last and not output.cuts_last:  # to be scattered: (ranks * first dimension, ...)
            local = local.unflatten(output.dim, (x.device_mesh.size(), -1)).movedim(output.dim, 0).flatten(0, 1)
        y = pipeline.run((one,), local, (), first, owner, spread)
        if spread.dim and not spread.cuts_last and output.cuts_last:  # gathered: (ranks * first dimension, ...)
            y = y.unflatten(0, (-1, spread.shape[0])).movedim(0, spread.dim).flatten(spread.dim, spread.dim + 1)
        x = LocalPieces(y, name) if output.of_pieces else from_local(y, output)
    return x


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


def from_local(y: Tensor, spread: Spread) -> DTensor:
    """The DTensor whose local tensor on this rank is `y`."""
    shape, placement = torch.Size(spread.shape), spread.placement
    stride = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
    placements = (Replicate() if isinstance(placement, Partial) else placement,)

    def value(y: Tensor) -> DTensor:
        return DTensor.from_local(y, spread.mesh, (placement,), run_check=False, shape=shape, stride=stride)

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
