"""The planes that FSDP2's all-gathers of one parameter send, and the buffers in which planes arrive.

A forward reads rowwise planes and a backward columnwise ones. If FSDP2 gathers the parameter for each of them, each
gather sends that plane alone. A columnwise plane that follows from the rowwise one without loss never travels.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from duotone.errors import UserError
from duotone.formats import Format
from duotone.tensor.context import Slot
from duotone.tensor.plane import (
    BOTH,
    Plane,
    Planes,
    Usage,
    derived,
    from_wire,
    gather,
    require_whole_blocks,
    same_memory,
    sharded_parts,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

ROW_DIM, COLUMN_DIM = 0, 1
"""The dimension of each plane that holds the rows of the tensor, which FSDP shards."""

ROWWISE, COLUMNWISE, NOTHING = Usage(True, False), Usage(False, True), Planes(None, None)
CHECKPOINT = "_checkpoint_wrapped_module"
"""Part of the names of modules that torch's wrapper recomputes in backward."""


class Gathers:
    """The gathers of one parameter whose planes have these formats.

    `derives`: the columnwise plane is the transpose of the rowwise one, without loss.
    """

    states: "type[TrainingState]"
    """torch's enum, set as soon as a group exists."""

    def __init__(self, formats: tuple[Format | None, Format | None], derives: bool) -> None:
        self.formats, self.derives = formats, derives
        self._param: weakref.ref[FSDPParam] | None = None
        self._group: weakref.ref[FSDPParamGroup] | None = None
        """Weak references: they lead back to the shard through a view in C++, which no garbage collector follows."""
        self.rows: int | None = None
        """The rows of the tensor, if the padded pieces of all ranks have more rows together."""
        self.amaxes: tuple[Tensor | None, Tensor | None] = None, None
        """For planes with delayed scales: the amaxes that each forward records, fp32 (1,)."""
        self.keeps_rowwise = False
        """Whether backward reads the rowwise plane too."""
        self.sent = self.valid = BOTH
        """The planes that the last gather sent, and the planes that hold values now."""
        self.shard = self.whole = NOTHING
        """This rank's parts that do not travel, kept until they are copied, and the planes of all ranks."""
        self.source: object = None
        """The source of the scales that the last forward sent, in formats whose backward sends again."""
        self.wires: tuple[list[Tensor], list[Tensor]] = [], []
        """The flat buffers in which each plane arrives. FSDP2 allocates those of the first gather."""
        self.names: dict[int, list[str]] = {}
        """The parts of each plane that travel."""
        self.derived: list[Tensor] = []
        """The buffers of a columnwise plane that is a transposed copy of the rowwise one."""

    @property
    def param(self) -> "FSDPParam | None":
        """FSDP2's object for this shard."""
        return self._param() if self._param is not None else None

    @property
    def group(self) -> "FSDPParamGroup | None":
        """The parameters that FSDP2 gathers with this one."""
        return self._group() if self._group is not None else None

    def find(self, shard: Tensor) -> None:
        """Find FSDP2's own objects for this shard. Without them every gather sends both planes."""
        if self.param is None:
            param, group = owners(shard)
            if param is not None and group is not None:
                self._param, self._group = weakref.ref(param), weakref.ref(group)
                self.states = type(group._training_state)
        if self.param is not None and self.group is not None and self.whole == NOTHING:
            module = self.param._module_info.module
            parts: list[tuple[str, torch.nn.Module]]
            parts = [pair for root in self.group.modules for pair in root.named_modules()]  # type: ignore
            self.keeps_rowwise |= any(part is module and CHECKPOINT in name for name, part in parts)

    def send(self, mesh: "DeviceMesh", encode: Callable[[Usage], Planes], source: object | None) -> tuple[Tensor, ...]:
        """The buffers of this rank for a gather over a mesh. `encode` gives planes of the shard.

        A `source` that is the object of the last forward has the scales that this forward sent.
        """
        is_first = self.whole == NOTHING
        if is_first:
            self.count = mesh.size()
            if self.group is not None and self.group._use_post_forward_mesh:
                raise UserError(
                    "reshard_after_forward as a number takes parameters of one buffer, and quantized ones have "
                    "several; give fully_shard reshard_after_forward=True or False"
                )
        self.encode, self.sent = encode, self._sent_now()
        rowwise, columnwise = self.sent
        self.valid = Usage(rowwise, columnwise or (self.derives and (not self.derived or self._needs_columnwise)))
        self.shard = row, col = encode(BOTH if is_first or self.count == 1 else self.sent)
        self.is_repeated = self.derives and source is not None and source is self.source
        self.source = None if self.is_backward else source
        if self.count == 1:  # the shard is the whole tensor, and FSDP2 would only copy its first buffer
            return (torch.empty(0, dtype=torch.uint8, device=self.shard.buffers[0].device),)
        if self.param is not None and not is_first:
            of_row, of_col = self.wires
            self.param.all_gather_outputs = (of_row if rowwise else []) + (of_col if columnwise else [])
            self.param._unsharded_inner_tensors = self.derived if self.valid.columnwise else []
        sent = self._wire(row, ROW_DIM) if row is not None and rowwise else []
        sent += self._wire(col, COLUMN_DIM) if col is not None and columnwise else []
        if not is_first:
            self.shard = Planes(self._staying(row, ROW_DIM), self._staying(col, COLUMN_DIM))
        return tuple(sent)

    def _staying(self, plane: Plane | None, dim: int) -> Plane | None:
        """The plane without the parts that travel. Their memory is free as soon as they are sent."""
        if plane is None or dim not in self.names:
            return plane
        parts = {name: part for name, part in plane.parts.items() if name not in self.names[dim]}
        return Plane(plane.format, parts, plane.shape)

    def _wire(self, plane: Plane, dim: int) -> list[Tensor]:
        if dim not in self.names:
            require_whole_blocks(plane, dim)
            self.names[dim] = sharded_parts(plane, dim)
        parts = [plane.parts[name] for name in self.names[dim]]
        return [(part.t() if dim == COLUMN_DIM else part).contiguous() for part in parts]

    def _sent_now(self) -> Usage:
        row, col = self.formats
        if row is None or col is None or self.derives:
            return Usage(row is not None, row is None)
        group = self.group
        if group is None or not group._reshard_after_forward:
            return BOTH
        if not self._needs_columnwise:
            return ROWWISE
        return COLUMNWISE if self.is_backward and group.reshard_after_backward and not self.keeps_rowwise else BOTH

    @property
    def is_backward(self) -> bool:
        """Whether the gather is one for a backward."""
        group = self.group
        return group is not None and group._training_state is self.states.PRE_BACKWARD

    @property
    def _needs_columnwise(self) -> bool:
        """Whether this pass, or a later pass without a gather, reads the columnwise plane."""
        group = self.group
        if group is None or not group._reshard_after_forward or group._training_state is not self.states.FORWARD:
            return True
        return torch._C._current_graph_task_id() != -1  # the forward recomputes, and its backward gathers nothing

    def receive(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Update `whole`. Returns the buffers that FSDP2 has to free beside those of the first gather."""
        if self.whole == NOTHING:
            self._build([output.view(-1) for output in outputs])
            return tuple(self.derived)
        for whole, shard, dim in zip(self.whole, self.shard, (ROW_DIM, COLUMN_DIM), strict=True):
            if (
                not self.is_repeated
                and whole is not None
                and shard is not None
                and not (dim == COLUMN_DIM and self.derives and self.count > 1)
            ):
                _refresh(whole, shard, sharded_parts(shard, dim) if self.count > 1 else ())
        row, col = self.whole
        if self.derived and row is not None and col is not None and self.valid.columnwise:
            _refresh(col, derived(row), ())
        return ()

    def deliver(
        self, outputs: Sequence[Tensor], out: Any, make: Callable[[Planes], Any]
    ) -> tuple[Any, tuple[Tensor, ...]] | None:
        """What FSDP2's second hook returns: a new tensor over the planes that arrived, or None if `out` has them."""
        freed = self.receive(outputs)
        if out is None:
            whole = make(self.whole)
            whole.gathers = self
            return whole, freed
        out._rowwise, out._columnwise = self.whole
        return None

    def _build(self, outputs: list[Tensor]) -> None:
        row, col = self.whole = self.shard
        if self.count == 1:
            return
        if row is not None:
            sent = len(self.names[ROW_DIM]) if self.sent.rowwise else 0
            row = self._arriving(row, ROW_DIM, outputs[:sent])
            outputs = outputs[sent:]
        if row is not None and self.derives:
            col = derived(row)
            shares = same_memory(row.parts["codes"], col.parts["codes"])
            self.derived = [] if shares else [*col.parts.values()]
        elif col is not None:
            col = self._arriving(col, COLUMN_DIM, outputs)
        self.whole = Planes(row, col)

    def _arriving(self, shard: Plane, dim: int, outputs: list[Tensor]) -> Plane:
        """The plane of all ranks over these flat buffers, or over new ones whose memory a later gather allocates."""
        parts = [shard.parts[name] for name in sharded_parts(shard, dim)]
        wires = outputs or [part.new_empty(part.numel() * self.count) for part in parts]
        self.wires[dim].extend(wires)
        tails = [part.shape[1:] if dim == ROW_DIM else part.shape[:-1] for part in parts]
        shaped = [wire.view(-1, *tail) for wire, tail in zip(wires, tails, strict=True)]
        plane = self._without_padding(from_wire(shard, dim, shaped, self.count), dim)
        for wire in wires if not outputs else ():
            wire.untyped_storage().resize_(0)
        return plane

    def _without_padding(self, plane: Plane, dim: int) -> Plane:
        return plane if self.rows is None else plane.first(dim, self.rows)

    @property
    def is_delayed(self) -> bool:
        """Whether any plane records an amax for delayed scaling."""
        return any(amax is not None for amax in self.amaxes)

    def record(self, slots: tuple[Slot | None, Slot | None], usage: Usage) -> None:
        """Let the slots of a call record the amaxes, for the planes that the call and its backward read."""
        for slot, amax, is_read in zip(slots, self.amaxes, usage, strict=True):
            if slot is not None and amax is not None and is_read:
                slot.record(amax)

    def readable(self, planes: Planes, usage: Usage) -> Planes:
        """The planes. Those of `usage` that the last gather did not send are gathered now, by all ranks."""
        read = list(planes)
        for dim, (needs, valid) in enumerate(zip(usage, self.valid, strict=True)):
            if needs and not valid and planes[dim] is not None and planes[dim] is self.whole[dim]:
                assert self.param is not None
                self.keeps_rowwise |= dim == ROW_DIM
                shard = self.encode(Usage(dim == ROW_DIM, dim == COLUMN_DIM))[dim]
                group = self.param.shard_mesh.get_group().group_name
                read[dim] = shard and self._without_padding(gather(shard, dim, group, self.count), dim)
        return Planes(*read)


def fsdp_groups() -> "Iterator[FSDPParamGroup]":
    """The groups of parameters that FSDP2 gathers together, of all models."""
    from torch.distributed._composable_state import _module_state_mapping as states

    for reference in list(states.values()):
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        yield from (group for group in groups if group is not None)


def frees_after_forward(module: torch.nn.Module) -> bool:
    """Whether FSDP2 frees the parameters of a module after its forward, and gathers them again for its backward."""
    groups = (group for group in fsdp_groups() if group._reshard_after_forward)
    places = (param._module_info for group in groups for param in group.fsdp_params)
    return any(module in (place.module, *place.shared_modules) for place in places)


def owners(shard: Tensor) -> "tuple[FSDPParam, FSDPParamGroup] | tuple[None, None]":
    """FSDP2's object for a shard, and its group of parameters that are gathered together."""
    for group in fsdp_groups():
        for param in group.fsdp_params:
            if param._sharded_local_tensor is shard:
                return param, group
    return None, None


def _refresh(whole: Plane, fresh: Plane, gathered: Sequence[str]) -> None:
    """Copy the parts that did not arrive by a gather. They may be the same memory."""
    for name, part in whole.parts.items():
        if name not in gathered and part.data_ptr() != fresh.parts[name].data_ptr():
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(part):  # type: ignore
                part.copy_(fresh.parts[name])
