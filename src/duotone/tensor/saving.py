"""Keeping planes for backward: as flat lists of tensors that autograd can hold, and back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from duotone.errors import MissingPlaneError, UserError
from duotone.tensor.plane import Plane, Planes
from duotone.tensor.quantized import QuantizedTensor

Shell = Any
"""What a kept thing is besides its buffers: a plane is (format, shape, part names), a tensor TENSOR, a plane that is
made later (DEFERRED, make, number of tensors)."""

TENSOR, DEFERRED = "tensor", "deferred"


@dataclass(eq=False, slots=True)
class DeferredPlane:
    """A plane that backward makes, of tensors that are kept anyway: `make(*tensors)`."""

    make: Callable[..., Plane]
    tensors: tuple[Tensor | None, ...]

    def materialize(self) -> Plane:
        return self.make(*self.tensors)


def pack(kept: Sequence[Any]) -> tuple[list[Shell], list[Tensor]]:
    """Planes and tensors as shells and a flat list of buffers; None and tuples of one thing stay as they are."""
    shells: list[Shell] = []
    tensors: list[Any] = []
    for one in kept:
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


def unpack(shells: Sequence[Shell], tensors: Sequence[Tensor]) -> list[Any]:
    """The inverse of `pack`; may be called again, for a second backward."""
    at = 0
    kept: list[Any] = []
    for shell in shells:
        if shell is None or len(shell) == 1:
            kept.append(shell)
        elif shell is TENSOR:
            kept.append(tensors[at])
            at += 1
        elif shell[0] is DEFERRED:
            _, make, count = shell
            kept.append(DeferredPlane(make, tuple(tensors[at : at + count])))
            at += count
        else:
            fmt, shape, names = shell
            kept.append(Plane(fmt, dict(zip(names, tensors[at : at + len(names)], strict=True)), shape))
            at += len(names)
    return kept


def prepare_for_saving(t: QuantizedTensor) -> list[Tensor]:
    """Take the buffers out of `t`, rowwise first; it keeps only their description until `restore_from_saved`."""
    if "_shells" in vars(t):
        raise MissingPlaneError(f"the buffers of {t!r} are taken out already; call restore_from_saved first")
    shells, tensors = pack(t.planes)
    t._shells = shells  # type: ignore[attr-defined]
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
    """Give the memory of every buffer back at once, also where others hold a reference; the shape stays."""
    for part in t.parts:
        part.data = part.new_empty(0)
    t._rowwise = t._columnwise = None
