"""DTensors and the shards in them: what a rank holds, and with whom its writes agree."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeGuard, cast

from torch import Tensor

from duotone.comm import ShardContext
from duotone.errors import MissingPlaneError, UserError
from duotone.formats import Format
from duotone.tensor.fsdp import ShardHooks
from duotone.tensor.plane_tensor import PlaneTensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_distributed(x: object) -> "TypeGuard[DTensor]":
    """Whether a tensor is a DTensor, without importing that."""
    return hasattr(x, "device_mesh")


def shard_of(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)  # `to_local` may return another view


def version_of(tensor: Tensor) -> int:
    """A number that each write raises, to the tensor or to this rank's shard of it. Inference tensors count none."""
    return sum(0 if each.is_inference() else each._version for each in {tensor, shard_of(tensor)})


def link_shards(parameters: Iterable[Tensor | None]) -> None:
    """Link quantized shards among these parameters to their other shards: all later writes agree on scales.

    FSDP gives a shard its mesh only at a gather, so a module links its shards as soon as it has them. Raises
    MissingPlaneError if ranks would gather pieces of different sizes, UserError if pieces are not of rows.
    """
    for parameter in parameters:
        shard = None if parameter is None else shard_of(parameter)
        if shard is parameter or not isinstance(shard, ShardHooks):
            continue
        holder = cast("DTensor", parameter)
        if shard.context.shard is None or holder.device_mesh.ndim > 1:  # others know it already
            shard.context = replace(shard.context, shard=_sharded(holder, shard) or shard.context.shard)


def shard_context(holder: "DTensor", formats: Sequence[Format | None]) -> ShardContext | None:
    """The ranks that have to agree on scales of these formats. None if each rank has the whole tensor.

    If some ranks cut rows and others columns, the first cut decides for scales of whole rows or columns.
    """
    mesh, cuts = holder.device_mesh, cuts_of(holder)
    alike = all(fmt.spans(0) == fmt.spans(1) for fmt in formats if fmt is not None)
    if not alike and len({dim for _, dim in cuts}) > 1:
        cuts = cuts[:1]
    if len(cuts) < 2:
        return ShardContext(mesh.get_group(cuts[0][0]).group_name, cuts[0][1]) if cuts else None
    names = mesh.mesh_dim_names
    assert names is not None  # only FSDP2 sets them
    return ShardContext(mesh[tuple(names[at] for at, _ in cuts)]._flatten().get_group().group_name)


def cuts_of(holder: "DTensor") -> list[tuple[int, int]]:
    """The dimensions of the mesh that cut the tensor, each with the dimension of the tensor that it cuts."""
    return [(at, each.dim) for at, each in enumerate(holder.placements) if not each.is_replicate()]  # type: ignore


def _sharded(holder: "DTensor", shard: "ShardHooks") -> ShardContext | None:
    """`shard_context` of a parameter that FSDP2 sharded."""
    if holder.dim() != 2:
        raise UserError("FSDP2 gathers no packed weight of experts that is quantized; keep a weight for each expert")
    cuts = cuts_of(holder)
    if cuts and cuts[0][1] != 0:
        raise UserError(
            f"a quantized weight would be cut as {holder.placements}, and FSDP2 gathers planes along rows; let "
            "shard_placement_fn give Shard(0) for it"
        )
    ranks = math.prod(holder.device_mesh.size(at) for at, dim in cuts if dim == 0)
    if holder.shape[0] % ranks:
        raise MissingPlaneError(
            f"{holder.shape[0]} rows over {ranks} ranks are uneven; make them a multiple of the ranks"
        )
    return shard_context(holder, shard.formats)


def shard_behind(weight: PlaneTensor) -> PlaneTensor:
    """The shard of a weight that FSDP2 gathered from quantized shards: optimizers write it. Else the weight."""
    param = None if weight.gathers is None else weight.gathers.param
    shard = weight if param is None else param._sharded_local_tensor
    return shard if isinstance(shard, type(weight)) else weight
