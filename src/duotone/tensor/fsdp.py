"""FSDP2's two hooks, generic over what each format declares of its buffers.

Each plane travels in its wire form, a columnwise plane that is a view of the rowwise one not at all. Scales that span
the sharded rows are not gathered: every shard has agreed on them when it was written, for which it knows its group from
the moment it is sharded on (`tell_shards`).
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from duotone.comm import ShardContext
from duotone.errors import MissingPlaneError, UserError
from duotone.tensor import wire
from duotone.tensor.context import QuantizeContext
from duotone.tensor.plane import Plane, Planes

ROW_DIM, COLUMN_DIM = 0, 1
"""The dimension of each plane that holds the rows of the tensor, which FSDP shards."""


class ShardHooks:
    """Mixed into QuantizedTensor."""

    planes: Planes
    context: QuantizeContext
    dtype: torch.dtype
    shape: torch.Size

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """The buffers to gather, the sharded dimension first; later writes of this shard agree with the others."""
        del outer_size, outer_stride, module, mp_policy
        if self.context.shard is None:
            self.context = replace(self.context, shard=ShardContext(mesh.get_group().group_name))
        row, col = self.planes
        sent: list[Tensor] = []
        if row is not None:
            sent += wire.to_wire(row, ROW_DIM)
        if col is not None and not self.planes.aliased:
            sent += wire.to_wire(col, COLUMN_DIM)
        return tuple(sent), (self, mesh.size())

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """The whole tensor over the gathered buffers; with `out`, refresh what the gather itself did not."""
        shard, count = metadata
        made = _gathered(shard, outputs, count, param_dtype)
        if out is None:
            rows = shard.shape[0] * count
            whole = shard.with_planes(made, torch.Size((rows, *shard.shape[1:])), dtype=param_dtype)
            whole.context = QuantizeContext()
            return whole, outputs
        for mine, fresh in zip(out.planes, made, strict=True):
            if mine is not None and fresh is not None:
                _refresh(mine, fresh)
        return None


def tell_shards(parameters: Iterable[Tensor | None]) -> None:
    """Quantized shards among these parameters agree with the other shards on whatever is written from now on.

    FSDP hands a shard its mesh only when it gathers, so a module tells its own shards as soon as they are there.
    Raises MissingPlaneError where ranks would gather pieces of different sizes.
    """
    for parameter in parameters:
        holder: Any = parameter
        shard = getattr(holder, "_local_tensor", None)  # of a DTensor; `to_local` may give another view
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


def _gathered(shard: Any, outputs: tuple[Tensor, ...], count: int, dtype: torch.dtype) -> Planes:
    row, col = shard.planes
    for plane in (row, col):
        if (
            plane is not None
            and any(s.dtype is None for s in plane.format.parts(1, 1).values())
            and dtype != shard.dtype
        ):
            raise UserError(
                f"a high-precision plane in {shard.dtype} cannot be gathered as {dtype}; set param_dtype to its dtype"
            )
    aliased, at = shard.planes.aliased, 0
    whole_row = whole_col = None
    if row is not None:
        at = _travelling(row, ROW_DIM)
        whole_row = wire.from_wire(row, ROW_DIM, outputs[:at], count)
    if col is not None:
        if aliased and whole_row is not None:
            whole_col = whole_row.transposed()
        else:
            whole_col = wire.from_wire(col, COLUMN_DIM, outputs[at:], count)
    return Planes(whole_row, whole_col)


def _travelling(plane: Plane, dim: int) -> int:
    return sum(spec.entries[dim] is not None for spec in plane.format.parts(*plane.shape).values())


def _refresh(mine: Plane, fresh: Plane) -> None:
    for name, part in mine.parts.items():
        if part.data_ptr() != fresh.parts[name].data_ptr():
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(part):  # type: ignore
                part.copy_(fresh.parts[name])
