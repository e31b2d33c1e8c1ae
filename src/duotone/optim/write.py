"""One step of AdamW on a master, and the write of its parameter: by kernels on CUDA, else in plain torch."""

from typing import Any

import torch
from torch import Tensor

from duotone.dispatch.casts import can_read_once, has_kernels
from duotone.dispatch.target import target
from duotone.optim.rates import Rates
from duotone.optim.update import State, update
from duotone.tensor import Plane, QuantizedTensor, Quantizer


def write(parameter: Tensor, state: State, rates: Rates) -> None:
    """One step; `parameter` becomes what `copy_` makes of the fp32 master: rounded, or each plane encoded."""
    if has_kernels(state.master) and has_kernels(state.grad):
        _by_kernels(parameter, state._replace(grad=state.grad.contiguous()), rates)
    else:
        update(state, rates)
        parameter.copy_(state.master)


def _by_kernels(parameter: Tensor, state: State, rates: Rates) -> None:
    """Planes under one given scale are written by the step itself, and so is a contiguous plain parameter; others from
    the master."""
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


def _target(parameter: QuantizedTensor, master: Tensor) -> Any:
    """The `kernels.adamw.Target` for all planes that are held, or None where they are not one cast under one scale.

    Asking for the scale says that this write records its amax.
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
    is_plain = type(quantizer) is Quantizer and quantizer.columnwise_source == "original"
    is_plain = is_plain and row in (None, quantizer.rowwise) and col in (None, quantizer.columnwise)
    return (
        is_plain
        and (row is None or col is None or row == col)
        and can_read_once(row, col, torch.float32, target(parameter.device))
    )


def _buffers(plane: Plane | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if plane is None else (plane.parts["codes"], plane.parts["scale"])
