"""Master weights: which parameters have a master, and its first values."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from duotone.formats import Format
from duotone.optim.moments import CODES, DTYPES, cuts_blocks
from duotone.optim.update import Group, Saved
from duotone.tensor import QuantizedTensor
from duotone.tensor.context import FixedScale
from duotone.tensor.fsdp import shard_of, version_of
from duotone.tensor.plane_tensor import CONVERTED


def needs_master(parameter: Tensor, group: Group) -> bool:
    """Whether a parameter is quantized or, if the group asks for masters, has fewer bits than fp32."""
    if isinstance(parameter, QuantizedTensor):
        return True
    return group["master_weights"] and parameter.is_floating_point() and parameter.dtype.itemsize < 4


def is_computed(parameter: Tensor, state: Saved, group: Group) -> bool:
    """Whether this library computes the step of a parameter with this state, in fp32, instead of torch's functions."""
    if "master" in state or needs_master(shard_of(parameter), group):
        return True
    if "exp_avg" in state and state["exp_avg"].dtype != parameter.dtype:  # torch's functions cannot read it
        return True
    moments = group["moment_dtype"]
    return moments is not None and not parameter.dtype == torch.float32 == DTYPES[moments]


def stored_dtypes(parameter: Tensor, state: Saved, group: Group) -> dict[str, torch.dtype]:
    """The dtypes of the stored moments and master, by name, of a parameter whose step is computed here."""
    first = DTYPES[group["moment_dtype"] or str(torch.float32)]
    has_no_blocks = parameter.dim() < 2 or cuts_blocks(parameter)
    dtypes = {
        "exp_avg": torch.float32 if first == CODES and has_no_blocks else first,
        "exp_avg_sq": torch.float32,
    }
    has_master = "master" in state or needs_master(shard_of(parameter), group)
    if has_master and group["master_dtype"] is not None:
        dtypes["master"] = DTYPES[group["master_dtype"]]
    return dtypes


def initial_master(parameter: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A new contiguous tensor: the preserved values from which the parameter was encoded, else its values.

    Preserved values count until the first write, such as a checkpoint. They are removed: the master replaces them.
    """
    values = None
    if isinstance(parameter, QuantizedTensor):
        values = parameter.get_high_precision_init_val() if parameter._version == 0 else None
        parameter.clear_high_precision_init_val()
    values = values_of(parameter) if values is None else values
    return torch.empty(parameter.shape, dtype=dtype, device=parameter.device).copy_(values)


def values_of(parameter: Tensor) -> Tensor:
    """The values of a parameter, without a gradient; in fp32 if it is quantized."""
    return parameter.values(torch.float32) if isinstance(parameter, QuantizedTensor) else parameter.detach()


class Mark(NamedTuple):
    """A parameter as the last step left it, or the load of its master. It shows later writes of other code."""

    memory: StorageWeakRef
    """Weak, which prevents that the address is used again."""
    offset: int | torch.SymInt
    version: int
    dtype: torch.dtype
    format: Format | None
    """None for a plain parameter."""
    is_load: bool

    @staticmethod
    def of(parameter: Tensor, *, is_load: bool = False) -> "Mark":
        """The mark of the present state of a parameter."""
        codes, fmt, version = shard_of(parameter), None, version_of(parameter)
        if isinstance(codes, QuantizedTensor):
            plane = codes.planes.rowwise or codes.planes.columnwise
            if plane is not None:
                codes, fmt = plane.parts["codes"], plane.format
        memory = StorageWeakRef(codes.untyped_storage())
        return Mark(memory, codes.storage_offset(), version, parameter.dtype, fmt, is_load)


def adopt_writes(parameter: Tensor, master: Tensor, mark: Mark) -> None:
    """Copy to the master what other code wrote into the parameter since the mark.

    - A new version shows that the parameter was written.
    - After a move to other memory, after a load, and beside pieces of one weight, which share a version, it may have
      been written or not. Then the master takes the elements that differ from its rounded values.
    - A parameter that was converted to another format, and not written, keeps its master.
    """
    now = Mark.of(parameter)
    is_moved = now.memory != mark.memory or now.offset != mark.offset
    if not is_moved and now.version == mark.version:
        return
    is_alike = now.format == mark.format
    if not is_alike and vars(parameter).get(CONVERTED) == (mark.version, now.version):
        return
    parameter = shard_of(parameter)
    values = values_of(parameter)
    if is_alike and (is_moved or mark.is_load or parameter.untyped_storage().nbytes() > parameter.nbytes):
        expected = _rounded(parameter, master, mark.dtype)
        if expected is None:
            return
        values = torch.where(values == expected, master, values)
    master.copy_(values)


def _rounded(parameter: Tensor, master: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The values of the parameter in `dtype`, if only a step wrote it. None if they cannot be computed again.

    Shards agree on their scales, so all ranks call this.
    """
    if not isinstance(parameter, QuantizedTensor):
        return master.to(dtype).to(parameter.dtype)
    quantizer = parameter.quantizer
    if quantizer.is_stochastic or not quantizer.is_repeatable:
        return None
    written = parameter.detach().clone()
    assert isinstance(written, QuantizedTensor)
    scales = [plane.parts["scale"] if plane and plane.format.is_delayed else None for plane in written.planes]
    row, col = (None if scale is None else FixedScale(torch.ones_like(scale) / scale) for scale in scales)
    written.context = replace(parameter.context, slots=(row or col, col))  # the scales may have clipped the master
    return values_of(written.copy_(master))
