"""One step of AdamW on a master, and the write of its parameter: by kernels on CUDA, else in plain torch."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from duotone.dispatch.casts import can_read_once, has_kernels
from duotone.dispatch.target import target
from duotone.optim.update import Rates, State, update
from duotone.tensor import Plane, QuantizedTensor, Quantizer

if TYPE_CHECKING:
    from duotone.kernels.adamw import Target


def write(parameter: Tensor, state: State, rates: Rates) -> None:
    """One step; `parameter` becomes what `copy_` makes of the fp32 master: rounded, or each plane encoded."""
    if has_kernels(state.master) and has_kernels(state.grad):
        _by_kernels(parameter, state._replace(grad=state.grad.contiguous()), rates)
    else:
        update(state, rates)
        parameter.copy_(state.master)


def _by_kernels(parameter: Tensor, state: State, rates: Rates) -> None:
    """The step writes planes under one delayed scale, and contiguous plain parameters; others are copied afterwards."""
    from duotone.kernels import adamw

    target = _target(parameter, state.master) if isinstance(parameter, QuantizedTensor) else None
    if target is not None:
        adamw.update_planes(state, rates, target)
        torch.autograd.graph.increment_version(parameter)
    elif type(parameter) is torch.nn.Parameter and parameter.dtype != torch.float32 and parameter.is_contiguous():
        adamw.update(state, rates, parameter)
        torch.autograd.graph.increment_version(parameter)
    else:
        adamw.update(state, rates)
        parameter.copy_(state.master)


def _target(parameter: QuantizedTensor, master: Tensor) -> "Target | None":
    """Where a kernel writes all planes of the parameter. None unless they are one cast under one delayed scale.

    Asking the slot for its scale also makes this write record its amax.
    """
    row, col = parameter.planes
    plane = row or col
    if plane is None or not plane.format.is_delayed or not _is_one_cast(parameter):
        return None
    from duotone.kernels.adamw import Target

    context = parameter._write_context()
    slot = context.slots[0] if row is not None else context.slots[1] or context.slots[0]
    parts = *_buffers(row), *_buffers(None if parameter.planes.aliased else col)
    contiguous = all(part is None or part.is_contiguous() for part in parts)
    if slot is None or slot.is_new or context.shard is not None or not contiguous:
        return None
    fmt, place = plane.format, slot.place(master)
    assert fmt.code_dtype is not None
    return Target(parameter.matrix_shape, fmt.code_dtype, fmt.scale_codec, *parts, *place, context.propagate)


def _is_one_cast(parameter: QuantizedTensor) -> bool:
    """Whether both planes hold the codes of one cast, which a kernel makes."""
    row, col = (plane and plane.format for plane in parameter.planes)
    quantizer = parameter.quantizer
    if type(quantizer) is not Quantizer or quantizer.columnwise_source != "original":
        return False
    if row not in (None, quantizer.rowwise) or col not in (None, quantizer.columnwise):
        return False
    if row is not None and col is not None and row != col:
        return False
    return can_read_once(row, col, torch.float32, target(parameter.device))


def _buffers(plane: Plane | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if plane is None else (plane.parts["codes"], plane.parts["scale"])
