"""One step of AdamW on an fp32 master, in plain torch: the twin of the kernels in `duotone.kernels.adamw`.

With gradient g, moments m and v, master p and the numbers of `Rates` (Loshchilov and Hutter, "Decoupled Weight Decay
Regularization", 2019, algorithm 2), in this order, every operation rounded to fp32 by itself:

    m = m + (g - m) (1 - beta1)
    v = v beta2 + (g (1 - beta2)) g
    p = p (1 - lr weight_decay) - (m step_size) / (sqrt(v) correction + eps)

State in bf16 is rounded when it is stored, and the parameter is written from the stored master.

So the CPU and CUDA give the same bits. `write` also writes the parameter: by kernels on CUDA, else in plain torch.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from duotone.dispatch.casts import can_read_once, has_kernels
from duotone.dispatch.target import target
from duotone.tensor import Plane, QuantizedTensor, Quantizer

if TYPE_CHECKING:
    from duotone.kernels.adamw import Target


Group = dict[str, Any]
"""A parameter group of torch: "params" and hyperparameters by name."""
Saved = dict[str, Any]
"""The state of one parameter: "step", "exp_avg", "exp_avg_sq" and, if it has one, "master"."""


N = TypeVar("N", float, Tensor)


class Rates(NamedTuple, Generic[N]):
    """The factors of one step: Python floats, each rounded to fp32 where it is used, or fp64 on a device."""

    sign: float
    """-1 if the objective is maximized, else 1."""
    decay: N
    """1 - lr weight_decay."""
    first: float
    """1 - beta1."""
    beta2: float
    second: float
    """1 - beta2."""
    step_size: N
    """lr / (1 - beta1^t)."""
    correction: N
    """1 / sqrt(1 - beta2^t)."""
    eps: float

    @staticmethod
    def of(group: Group, step: N) -> "Rates[N]":
        """The numbers of a parameter group at step t = 1, 2, ..., or at fp64 steps (n,) on a device."""
        lr = group["lr"] if isinstance(step, Tensor) else float(group["lr"])
        beta1, beta2 = map(float, group["betas"])
        return Rates(
            sign=-1.0 if group["maximize"] else 1.0,
            decay=1 - lr * group["weight_decay"],
            first=1 - beta1,
            beta2=beta2,
            second=1 - beta2,
            step_size=lr / (1 - beta1**step),
            correction=(1 - beta2**step) ** -0.5,
            eps=float(group["eps"]),
        )


Numbers = Rates[float] | Tensor
"""`Rates` of the host, or in fp32 (8,) on the device."""


def numbers_of(group: Group, steps: Sequence[Tensor]) -> Sequence[Numbers]:
    """The numbers of parameters at these steps. For a capturable group the device computes them, in fp64."""
    if not group["capturable"] or not steps:
        return [Rates.of(group, step.item()) for step in steps]
    t = torch.stack([*steps]).to(torch.float64)
    return torch.stack([torch.zeros_like(t) + column for column in Rates.of(group, t)], 1).to(torch.float32).unbind()


class State(NamedTuple):
    """The tensors of one step, in the shape of the parameter. Those that it writes are contiguous, in fp32 or,
    except `exp_avg_sq`, bf16.

    The gradient may be in any floating dtype, and need not be contiguous.
    """

    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor


def update(state: State, numbers: Numbers) -> None:
    """One step, in place."""
    grad, *stored = state
    m, v, p = (tensor.to(torch.float32) for tensor in stored)
    sign, decay, first, beta2, second, step_size, correction, eps = numbers
    g = grad.to(torch.float32) * sign
    m.add_((g - m).mul_(first))
    v.mul_(beta2).add_((g * second).mul_(g))
    root = v.to(torch.float64).sqrt_().to(torch.float32)  # MKL's root of fp32 is not always the nearest
    p.mul_(decay).sub_((m * step_size).div_(root.mul_(correction).add_(eps)))
    for tensor, value in zip(stored, (m, v, p), strict=True):
        if tensor is not value:
            tensor.copy_(value)


def write(parameter: Tensor, state: State, numbers: Numbers) -> bool:
    """One step. A plain parameter becomes the fp32 master, rounded.

    Returns whether the parameter is written. If not, it is quantized and its planes have still to be encoded.
    """
    if has_kernels(state.master) and has_kernels(state.grad):
        return _by_kernels(parameter, state._replace(grad=state.grad.contiguous()), numbers)
    update(state, numbers)
    return _copied(parameter, state.master)


def _copied(parameter: Tensor, master: Tensor) -> bool:
    if isinstance(parameter, QuantizedTensor):
        return False
    parameter.copy_(master)
    return True


def _by_kernels(parameter: Tensor, state: State, numbers: Numbers) -> bool:
    """The step writes planes under one delayed scale, and contiguous plain parameters."""
    from duotone.kernels import adamw

    target = _target(parameter, state.master) if isinstance(parameter, QuantizedTensor) else None
    plain = type(parameter) in (Tensor, torch.nn.Parameter) and parameter.dtype != torch.float32
    if isinstance(parameter, QuantizedTensor) and target is not None:
        adamw.update_planes(state, numbers, target)
        torch.autograd.graph.increment_version(parameter.planes.buffers)
    elif plain and parameter.is_contiguous():
        adamw.update(state, numbers, parameter)
    else:
        adamw.update(state, numbers)
        return _copied(parameter, state.master)
    torch.autograd.graph.increment_version(parameter)
    return True


def _target(parameter: QuantizedTensor, master: Tensor) -> "Target | None":
    """Where a kernel writes all planes of the parameter. None unless they are one cast under one delayed scale.

    Asking the slot for its scale also makes this write record its amax.
    """
    row, col = parameter.planes
    plane = row or col
    if plane is None or not plane.format.is_delayed or not _is_one_cast(parameter):
        return None
    from duotone.kernels.adamw import Target

    context = parameter._write_context(by_training=True)
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
