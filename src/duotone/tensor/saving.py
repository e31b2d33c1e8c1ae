"""Keeping planes for backward: as flat lists of tensors that autograd can hold, and back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from duotone.errors import MissingPlaneError, UserError
from duotone.tensor.plane import Plane, Planes
from duotone.tensor.quantized import QuantizedTensor

Shell = Any
"""What is left of a saved value without its buffers: (format, shape, part names) of a plane, TENSOR of a tensor,
(DEFERRED, make, number of tensors) of a deferred plane. None and tuples of one element stand for themselves."""

TENSOR, DEFERRED = "tensor", "deferred"


@dataclass(eq=False, slots=True)
class DeferredPlane:
    """A plane that backward makes from tensors that are saved anyway: `make(*tensors)`."""

    make: Callable[..., Plane]
    tensors: tuple[Tensor | None, ...]

    def materialize(self) -> Plane:
        return self.make(*self.tensors)


def pack(saved: Sequence[object]) -> tuple[list[Shell], list[Tensor | None]]:
    """Planes and tensors as shells and a flat list of buffers."""
    shells: list[Shell] = []
    tensors: list[Tensor | None] = []
    for one in saved:
        if isinstance(one, Plane):
            shells.append((one.format, one.shape, tuple(one.parts)))
            tensors.extend(one.parts.values())
        elif isinstance(one, Tensor):
            shells.append(TENSOR)
            tensors.append(one)
        elif isinstance(one, DeferredPlane):
            shells.append((DEFERRED, one.make, len(one.tensors)))
            tensors.extend(one.tensors)
        else:
            shells.append(one)
    return shells, tensors


def unpack(shells: Sequence[Shell], tensors: Sequence[Any]) -> list[Any]:
    """The inverse of `pack`. A second backward may call it again."""
    at = 0
    saved: list[Any] = []
    for shell in shells:
        if shell is None or len(shell) == 1:
            saved.append(shell)
        elif shell is TENSOR:
            saved.append(tensors[at])
            at += 1
        elif shell[0] is DEFERRED:
            _, make, count = shell
            saved.append(DeferredPlane(make, tuple(tensors[at : at + count])))
            at += count
        else:
            fmt, shape, names = shell
            saved.append(Plane(fmt, dict(zip(names, tensors[at : at + len(names)], strict=True)), shape))
            at += len(names)
    return saved


def prepare_for_saving(t: QuantizedTensor) -> list[Tensor]:
    """Take the buffers out of `t`, rowwise first. `t` only knows their shapes until `restore_from_saved`."""
    if "_shells" in vars(t):
        raise MissingPlaneError(f"the buffers of {t!r} are taken out already; call restore_from_saved first")
    tensors = t.parts
    t._shells, _ = pack(t.planes)  # type: ignore[attr-defined]
    t._rowwise = t._columnwise = None
    return tensors


def restore_from_saved(t: QuantizedTensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Put the buffers back and return those that belong to others."""
    if "_shells" not in vars(t):
        raise MissingPlaneError(f"nothing was taken out of {t!r}; call prepare_for_saving first")
    shells: list[Shell] = vars(t)["_shells"]
    count = sum(0 if shell is None else len(shell[2]) for shell in shells)
    if len(tensors) < count:
        raise UserError(f"{t!r} needs its {count} buffers back; got {len(tensors)}: pass all that were saved")
    t._rowwise, t._columnwise = Planes(*unpack(shells, tensors[:count]))
    delattr(t, "_shells")
    return list(tensors[count:])


def clear(t: QuantizedTensor) -> None:
    """Free the memory of every buffer at once, even if others hold a reference. The shape stays."""
    for part in t.parts:
        part.data = part.new_empty(0)
    t._rowwise = t._columnwise = None
