"""What a checkpoint of many ranks holds: plain tensors under flat names, cut over the ranks as their parameters are."""

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.optim import Optimizer

from duotone.conversion.naming import clean
from duotone.errors import UserError
from duotone.modules.planned import Planned
from duotone.optim.moments import laid_like, ranks_across, require_blocks
from duotone.sharding.dtensors import shard_of
from duotone.tensor import Plane, QuantizedTensor
from duotone.tensor.plane import sharded_parts

Cut = tuple[DeviceMesh, Sequence[Placement]]
GROUP = "groups"


@dataclass(frozen=True, eq=False)
class Entry:
    """`live` is the memory that is saved, and that a load writes. `cut` says how a shard lies over the ranks."""

    live: Tensor
    cut: Cut | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        mesh, placements = self.cut or (None, ())
        shards = [mesh.size(at) for at, each in enumerate(placements) if each.is_shard()] if mesh is not None else []
        return torch.Size([self.live.shape[0] * math.prod(shards), *self.live.shape[1:]]) if shards else self.live.shape

    def saved(self) -> Tensor:
        """What a checkpoint stores: `live`, or a DTensor over it."""
        return self._whole(self.live.detach().contiguous())

    def empty(self) -> Tensor:
        """A tensor for a load to fill."""
        return self._whole(torch.empty_like(self.live.detach(), memory_format=torch.contiguous_format))

    @torch.no_grad()
    def write(self, loaded: Tensor) -> None:
        """Copy loaded values into `live`."""
        self.live.copy_(shard_of(loaded) if self.cut is not None else loaded)

    def _whole(self, x: Tensor) -> Tensor:
        return x if self.cut is None else DTensor.from_local(x, *self.cut, run_check=False)


def model_entries(model: nn.Module, leave_out: Iterable[str]) -> dict[str, Entry]:
    """Parameters and persistent buffers. A quantized one is the parts of its planes, by side and format.

    UserError if a module has `parallel_mode`: nothing says how its shards lie, whether FSDP2 cuts them again or not.
    """
    for name, module in model.named_modules():
        if isinstance(module, Planned) and module.layout.group:
            raise UserError(
                f"{name or 'the model'} holds a shard of its weight (parallel_mode=), which a checkpoint cannot place; "
                "cut it with parallelize_module, whose parameters are DTensors"
            )
    entries: dict[str, Entry] = {}
    leave_out = set(leave_out)
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            warnings.warn(f"{name} is no tensor, so checkpoints do not hold it; save it in `extra`", stacklevel=4)
            continue
        if name in leave_out:
            continue
        shard = shard_of(value)
        if isinstance(shard, QuantizedTensor):
            cut = (value.device_mesh, value.placements) if isinstance(value, DTensor) else None
            if cut is not None and [each for each in cut[1] if not each.is_replicate()] not in ([], [Shard(0)]):
                raise UserError(
                    f"{name} is quantized and lies as {cut[1]}, which a checkpoint cannot place; save what "
                    "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) gives"
                )
            entries.update(_plane_entries(f"model.{clean(name)}", shard, cut))
        else:
            entries[f"model.{clean(name)}"] = Entry(value)
    return entries


def _plane_entries(name: str, t: QuantizedTensor, cut: Cut | None) -> Iterator[tuple[str, Entry]]:
    """The parts of both planes with the rows of the tensor first, without a columnwise plane that can be derived."""
    planes: tuple[tuple[str, int, Plane | None], ...] = (
        ("rowwise", 0, t.planes.rowwise),
        ("columnwise", 1, None if t.derives_columnwise else t.planes.columnwise),
    )
    for side, rows, plane in planes:
        for part, buffer in plane.parts.items() if plane is not None else ():
            assert plane is not None
            travels = part in sharded_parts(plane, rows)
            live = buffer.t() if rows == 1 and travels and buffer.dim() == 2 else buffer
            yield f"{name}.{side}.{plane.format.name}.{part}", Entry(live, cut if travels else None)


def end_writes(model: nn.Module) -> None:
    """Derive the planes that entries leave out, and count a write of every quantized parameter, as `copy_` does."""
    for parameter in model.parameters():
        shard = shard_of(parameter)
        if isinstance(shard, QuantizedTensor):
            row, col = shard.planes
            if shard.derives_columnwise and not shard.planes.aliased and row is not None and col is not None:
                derived = row.transposed()
                assert derived is not None
                col.copy_(derived)
            torch.autograd.graph.increment_version(shard)


def named_parameters(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    """The optimizer's parameters with their names, in the order of its state_dict.

    UserError if one is not the model's.
    """
    names = {id(parameter): clean(name) for name, parameter in model.state_dict(keep_vars=True).items()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(id(p) not in names for p in parameters):
        raise UserError("the optimizer updates a parameter that is not the model's; make it after the model is sharded")
    return [(names[id(p)], p) for p in parameters]


def optimizer_entries(model: nn.Module, optimizer: Optimizer) -> dict[str, Entry]:
    """The state of each parameter by its name, and the numbers of each group."""
    entries = group_entries(optimizer)
    for name, parameter in named_parameters(model, optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            entries[f"optimizer.{name}.{key}"] = Entry(as_tensor(value), _cut_of(value, parameter))
    return entries


def group_entries(optimizer: Optimizer) -> dict[str, Entry]:
    """Entries for the numbers in the parameter groups of an optimizer, such as its learning rates."""
    return {
        f"{GROUP}.{at}.{key}": Entry(as_tensor(value))
        for at, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if is_number(value) or (isinstance(value, tuple) and all(map(is_number, value)))
    }


def is_number(value: object) -> bool:
    """Whether a value is a number, or a tensor of one element."""
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def as_tensor(value: Any) -> Tensor:
    """A number or a tuple of numbers in fp64; a tensor is itself."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def _cut_of(value: object, parameter: Tensor) -> Cut | None:
    """How the state of a sharded parameter lies over the ranks, if it is a plain tensor with the shape of the shard."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return None
    return (parameter.device_mesh, parameter.placements) if value.shape == shard_of(parameter).shape else None


def empty_state(parameter: Tensor, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """The memory for one tensor of the state of a parameter in a load. The last dimensions of both may differ."""
    is_alike = size == parameter.shape or (0 < len(size) == parameter.dim() and size[:-1] == parameter.shape[:-1])
    if isinstance(parameter, DTensor) and is_alike:
        if size != parameter.shape:
            require_blocks(parameter)
        local, ranks = shard_of(parameter).shape, ranks_across(parameter)
        shape = local if size == parameter.shape else (*local[:-1], size[-1] // ranks)
        return laid_like(parameter, torch.empty(shape, dtype=dtype, device=parameter.device))
    return torch.empty(size, dtype=dtype, device=parameter.device if size == parameter.shape else "cpu")
