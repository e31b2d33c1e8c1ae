"""FSDP2's two hooks. They are generic: each format declares its buffers.

The planes that a pass reads (`Gathers`) travel in their wire form. Scales that span the sharded rows are not gathered:
all shards agree on them at each write. For this a shard knows its group from the moment it is sharded
(`link_shards`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from duotone.comm import ShardContext
from duotone.errors import MissingPlaneError, UserError
from duotone.formats import Format
from duotone.tensor.context import LOCAL
from duotone.tensor.gathers import Gathers
from duotone.tensor.plane import Planes
from duotone.tensor.plane_tensor import PlaneTensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


ARGUMENTS = "mesh", "outer_size", "outer_stride", "module", "mp_policy"
BEFORE = Signature([Parameter(name, Parameter.POSITIONAL_ONLY) for name in ARGUMENTS])
"""The signature of a hook before a gather. FSDP2 asks at every gather, and inspect would compute it each time."""


class BeforeGather:
    """The hook of one shard before a gather."""

    __signature__ = BEFORE

    def __init__(self, shard: "ShardHooks") -> None:
        self.shard = shard

    def __call__(
        self, mesh: "DeviceMesh", outer_size: object, outer_stride: object, module: object, mp_policy: object
    ) -> "tuple[tuple[Tensor, ...], tuple[ShardHooks, Gathers]]":
        """The buffers to gather, the sharded dimension first. Later writes of this shard agree with the others."""
        del outer_size, outer_stride, mp_policy
        shard = self.shard
        if shard.context.shard is None:
            shard.context = replace(shard.context, shard=ShardContext(mesh.get_group().group_name))
        if shard.gathers is None:
            shard.gathers = Gathers(shard.formats, shard.derives_columnwise)
        gathers = shard.gathers
        gathers.find(shard)
        if not gathers.derives:
            gathers.keeps_rowwise |= getattr(module, "differentiates_rowwise", False)
        return gathers.send(mesh, lambda usage: shard.planes, shard._rowwise), (shard, gathers)


class ShardHooks(PlaneTensor):
    """Mixed into QuantizedTensor."""

    @property
    def _fsdp_flattened(self) -> bool:
        return False

    @_fsdp_flattened.setter
    def _fsdp_flattened(self, _: bool) -> None:
        """FSDP1 sets this on parameters whose memory it takes over."""
        raise UserError(
            "FSDP1 takes no quantized parameters with use_orig_params=True; use fully_shard, which is FSDP2"
        )

    @property
    def fsdp_pre_all_gather(self) -> "BeforeGather":
        """FSDP2's hook before a gather."""
        return BeforeGather(self)

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: "tuple[ShardHooks, Gathers]",
        param_dtype: torch.dtype,
        *,
        out: PlaneTensor | None = None,
    ) -> tuple[PlaneTensor, tuple[Tensor, ...]] | None:
        """The whole tensor over the gathered buffers. With `out`, refresh its parts that the gather did not write."""
        shard, gathers = metadata
        self.gathers = gathers  # with CPU offload, `shard` is a copy
        gathers.find(self)

        def whole(planes: Planes) -> PlaneTensor:
            _require_dtype(shard, param_dtype)
            shape = torch.Size((shard.shape[0] * gathers.count, *shard.shape[1:]))
            tensor = shard.with_planes(planes, shape, dtype=param_dtype)
            tensor.context = LOCAL
            return tensor

        return gathers.deliver(outputs, out, whole)


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


def _require_dtype(shard: PlaneTensor, dtype: torch.dtype) -> None:
    keeps_dtype = any(spec.dtype is None for p in shard.planes if p for spec in p.format.parts(1, 1).values())
    if keeps_dtype and dtype != shard.dtype:
        raise UserError(
            f"a high-precision plane in {shard.dtype} cannot be gathered as {dtype}; set param_dtype to its dtype"
        )
