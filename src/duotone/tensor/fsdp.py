"""FSDP2's two hooks, generic over what each format declares of its buffers.

Each plane travels in its wire form; a columnwise plane that is a view of the rowwise one does not travel. Scales that
span the sharded rows are not gathered: all shards agree on them at each write. For this a shard knows its group from
the moment it is sharded (`tell_shards`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from duotone.comm import ShardContext
from duotone.errors import MissingPlaneError, UserError
from duotone.tensor.context import LOCAL
from duotone.tensor.plane import Plane, Planes, from_wire, sharded_parts, to_wire
from duotone.tensor.plane_tensor import PlaneTensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ROW_DIM, COLUMN_DIM = 0, 1
"""The dimension of each plane that holds the rows of the tensor, which FSDP shards."""


class ShardHooks(PlaneTensor):
    """Mixed into QuantizedTensor."""

    def fsdp_pre_all_gather(
        self, mesh: "DeviceMesh", outer_size: object, outer_stride: object, module: object, mp_policy: object
    ) -> tuple[tuple[Tensor, ...], "tuple[ShardHooks, int]"]:
        """The buffers to gather, the sharded dimension first. Later writes of this shard agree with the others."""
        del outer_size, outer_stride, module, mp_policy
        if self.context.shard is None:
            self.context = replace(self.context, shard=ShardContext(mesh.get_group().group_name))
        row, col = self.planes
        sent: list[Tensor] = []
        if row is not None:
            sent += to_wire(row, ROW_DIM)
        if col is not None and not self.planes.aliased:
            sent += to_wire(col, COLUMN_DIM)
        return tuple(sent), (self, mesh.size())

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: "tuple[ShardHooks, int]",
        param_dtype: torch.dtype,
        *,
        out: PlaneTensor | None = None,
    ) -> tuple[PlaneTensor, tuple[Tensor, ...]] | None:
        """The whole tensor over the gathered buffers. With `out`, refresh what the gather did not write there."""
        shard, count = metadata
        planes = _gathered(shard, outputs, count, param_dtype)
        if out is None:
            rows = shard.shape[0] * count
            whole = shard.with_planes(planes, torch.Size((rows, *shard.shape[1:])), dtype=param_dtype)
            whole.context = LOCAL
            return whole, outputs
        for mine, fresh in zip(out.planes, planes, strict=True):
            if mine is not None and fresh is not None:
                _refresh(mine, fresh)
        return None


def tell_shards(parameters: Iterable[Tensor | None]) -> None:
    """Let quantized shards among these parameters agree with the other shards on all later writes.

    FSDP gives a shard its mesh only at a gather, so a module tells its shards as soon as it has them. Raises
    MissingPlaneError if ranks would gather pieces of different sizes.
    """
    for parameter in parameters:
        holder: Any = parameter  # a DTensor, if it is sharded
        shard = getattr(holder, "_local_tensor", None)  # `to_local` may return another view
        if not isinstance(shard, ShardHooks) or shard.context.shard is not None:
            continue
        mesh, rows = holder.device_mesh, holder.shape[0]
        dims = [at for at, placement in enumerate(holder.placements) if placement.is_shard(0)]
        if len(dims) != 1:
            continue
        if rows % mesh.size(dims[0]):
            raise MissingPlaneError(
                f"{rows} rows over {mesh.size(dims[0])} ranks are uneven; make them a multiple of the ranks"
            )
        shard.context = replace(shard.context, shard=ShardContext(mesh.get_group(dims[0]).group_name))


def _gathered(shard: PlaneTensor, outputs: Sequence[Tensor], count: int, dtype: torch.dtype) -> Planes:
    row, col = shard.planes
    keeps_dtype = any(spec.dtype is None for p in (row, col) if p for spec in p.format.parts(1, 1).values())
    if keeps_dtype and dtype != shard.dtype:
        raise UserError(
            f"a high-precision plane in {shard.dtype} cannot be gathered as {dtype}; set param_dtype to its dtype"
        )
    if row is None:
        return Planes(None, col and from_wire(col, COLUMN_DIM, outputs, count))
    sent = len(sharded_parts(row, ROW_DIM))
    whole = from_wire(row, ROW_DIM, outputs[:sent], count)
    if shard.planes.aliased:
        return Planes(whole, whole.transposed())
    return Planes(whole, col and from_wire(col, COLUMN_DIM, outputs[sent:], count))


def _refresh(mine: Plane, fresh: Plane) -> None:
    for name, part in mine.parts.items():
        if part.data_ptr() != fresh.parts[name].data_ptr():
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(part):  # type: ignore
                part.copy_(fresh.parts[name])
