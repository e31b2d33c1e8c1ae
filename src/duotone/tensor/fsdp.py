"""FSDP2's two hooks, generic over what each format declares of its buffers.

Planes travel in their wire form, those that the pass reads (`Gathers`). Scales that span the sharded rows are not
gathered: all shards agree on them at each write. For this a shard knows its group from the moment it is sharded
(`tell_shards`).
"""

from collections.abc import Iterable
from dataclasses import replace
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from duotone.comm import ShardContext
from duotone.errors import MissingPlaneError, UserError
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
        """FSDP1 marks parameters so whose memory it would take over."""
        raise UserError(
            "FSDP1 takes no quantized parameters with use_orig_params=True; use fully_shard, which is FSDP2"
        )

    @property
    def fsdp_pre_all_gather(self) -> "BeforeGather":
        return BeforeGather(self)

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: "tuple[ShardHooks, Gathers]",
        param_dtype: torch.dtype,
        *,
        out: PlaneTensor | None = None,
    ) -> tuple[PlaneTensor, tuple[Tensor, ...]] | None:
        """The whole tensor over the gathered buffers. With `out`, refresh what the gather did not write there."""
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


def tell_shards(parameters: Iterable[Tensor | None]) -> None:
    """Let quantized shards among these parameters agree with the other shards on all later writes.

    FSDP gives a shard its mesh only at a gather, so a module tells its shards as soon as it has them. Raises
    MissingPlaneError if ranks would gather pieces of different sizes, UserError if pieces are not of rows.
    """
    for parameter in parameters:
        shard = None if parameter is None else shard_of(parameter)
        if shard is parameter or not isinstance(shard, ShardHooks) or shard.context.shard is not None:
            continue
        holder = cast("DTensor", parameter)
        mesh, rows = holder.device_mesh, holder.shape[0]
        if holder.dim() != 2:
            raise UserError(
                "FSDP2 gathers no packed weight of experts that is quantized; keep a weight for each expert"
            )
        dims = [at for at, placement in enumerate(holder.placements) if placement.is_shard()]
        if any(not holder.placements[at].is_shard(0) for at in dims):
            raise UserError(
                f"a quantized weight would be cut as {holder.placements}, and FSDP2 gathers planes along rows; let "
                "shard_placement_fn give Shard(0) for it"
            )
        if len(dims) != 1:
            continue
        if rows % mesh.size(dims[0]):
            raise MissingPlaneError(
                f"{rows} rows over {mesh.size(dims[0])} ranks are uneven; make them a multiple of the ranks"
            )
        shard.context = replace(shard.context, shard=ShardContext(mesh.get_group(dims[0]).group_name))


def _require_dtype(shard: PlaneTensor, dtype: torch.dtype) -> None:
    keeps_dtype = any(spec.dtype is None for p in shard.planes if p for spec in p.format.parts(1, 1).values())
    if keeps_dtype and dtype != shard.dtype:
        raise UserError(
            f"a high-precision plane in {shard.dtype} cannot be gathered as {dtype}; set param_dtype to its dtype"
        )
