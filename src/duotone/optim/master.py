"""Master weights: which parameters have a master, and its first values."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from duotone.formats import Format
from duotone.optim.moments import CODES, DTYPES, cuts_blocks
from duotone.optim.update import Group, Saved
from duotone.sharding.dtensors import shard_of, version_of
from duotone.tensor import QuantizedTensor
from duotone.tensor.context import FixedScale
from duotone.tensor.plane import location_of
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

    location: tuple[object, ...]
    """Of the parameter, or of the codes."""
    version: tuple[int, int]
    """Of the parameter, and of the buffer of its codes: another tensor may hold that, and write it."""
    dtype: torch.dtype
    format: Format | None
    """None for a plain parameter."""
    is_load: bool

    @staticmethod
    def of_another(parameter: Tensor) -> "Mark":
        """The mark of a parameter that got the state of another one. All that it holds was written since."""
        return Mark((), (-1, -1), parameter.dtype, None, is_load=True)

    @staticmethod
    def of(parameter: Tensor, *, is_load: bool = False) -> "Mark":
        """The mark of the present state of a parameter."""
        codes, fmt = shard_of(parameter), None
        if isinstance(codes, QuantizedTensor):
            plane = codes.planes.rowwise or codes.planes.columnwise
            if plane is not None:
                codes, fmt = plane.parts["codes"], plane.format
        version = version_of(parameter), version_of(codes)
        return Mark(location_of(codes), version, parameter.dtype, fmt, is_load)

    def shows_write(self, now: "Mark") -> bool:
        """Whether the parameter, with the mark `now`, has other memory or was written since."""
        return (self.location, self.version) != (now.location, now.version)


def adopt_writes(parameter: Tensor, master: Tensor, mark: Mark) -> None:
    """Let the master follow what other code wrote into the parameter since the mark.

    An element whose master, rounded or clipped, is what the parameter holds keeps its master, whoever wrote. So weights
    that are swapped out and back lose nothing. Each other element of the master takes the value of the parameter.

    - A parameter that was converted to another format, and not written, keeps its master.
    - A master that rounds at random cannot be rounded again. It takes all values if a new version shows a write.
    - Writes to a plain parameter through `.data`, or through another tensor in its memory, leave no version and are
      overwritten. `torch.autograd.graph.increment_version(parameter)` after such a write counts it: docs/limits.md.
    """
    now = Mark.of(parameter)
    is_moved = now.location != mark.location
    if not mark.shows_write(now):
        return
    if now.format != mark.format and vars(parameter).get(CONVERTED) == (mark.version[0], now.version[0]):
        return
    shard = shard_of(parameter)
    values, expected = values_of(shard), _rounded(shard, master, mark.dtype)
    if expected:
        is_same = torch.stack([values == each for each in expected]).any(0)
        master.copy_(torch.where(is_same, master, values))
    elif not (is_moved or mark.is_load or shard.untyped_storage().nbytes() > shard.nbytes):  # pieces share a version
        master.copy_(values)


def _rounded(parameter: Tensor, master: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return the values that the parameter, in `dtype` then, has if it holds the rounded master.

    The others are of a quantized parameter whose dequantized values were written back, which may give other scales.
    The list is empty if the values cannot be computed again. Shards agree on scales, so all ranks call this.
    """
    if not isinstance(parameter, QuantizedTensor):
        return [master.to(dtype).to(parameter.dtype)]
    quantizer = parameter.quantizer
    if quantizer.is_stochastic or not quantizer.is_repeatable:
        return []
    written = parameter.detach().clone()
    assert isinstance(written, QuantizedTensor)
    scales = [plane.parts["scale"] if plane and plane.format.is_delayed else None for plane in written.planes]
    row, col = (None if scale is None else FixedScale(torch.ones_like(scale) / scale) for scale in scales)
    written.context = replace(parameter.context, slots=(row or col, col))  # the scales may have clipped the master
    once = values_of(written.copy_(master))
    return [once, *(values_of(written.copy_(once.to(back))) for back in (torch.float32, dtype))]
