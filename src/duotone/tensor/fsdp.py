"""FSDP2's two hooks. They are generic: each format declares its buffers.

The planes that a pass reads (`Gathers`) travel in their wire form. Scales that span the sharded rows are not gathered:
all shards agree on them at each write. For this a shard knows its group from the moment it is sharded
(`link_shards`).
"""

from dataclasses import replace
from inspect import Parameter, Signature
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from duotone.comm import ShardContext
from duotone.errors import UserError
from duotone.tensor.context import LOCAL
from duotone.tensor.gathers import Gathers
from duotone.tensor.plane import Planes
from duotone.tensor.plane_tensor import PlaneTensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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


def _require_dtype(shard: PlaneTensor, dtype: torch.dtype) -> None:
    keeps_dtype = any(spec.dtype is None for p in shard.planes if p for spec in p.format.parts(1, 1).values())
    if keeps_dtype and dtype != shard.dtype:
        raise UserError(
            f"a high-precision plane in {shard.dtype} cannot be gathered as {dtype}; set param_dtype to its dtype"
        )
