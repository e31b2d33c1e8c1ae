"""Where a weight gradient goes: to autograd, into `main_grad`, or into a queue for later."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from duotone.dispatch.rule import Place, Product
from duotone.errors import MissingPlaneError


class Sink(Protocol):
    waits: bool
    """Whether `take` only keeps the product."""

    def begin(self) -> None:
        """A forward runs whose gradient comes here."""
        ...

    def take(self, product: Product, dy: Tensor) -> Tensor | None:
        """Compute the gradient now or keep it; what autograd is given for the weight."""
        ...


class ToAutograd:
    """The gradient in the dtype of dy; autograd accumulates it."""

    waits = False

    def begin(self) -> None:
        pass

    def take(self, product: Product, dy: Tensor) -> Tensor | None:
        return product.compute(dy.dtype, dy.dtype)


GRADIENT = ToAutograd()


@dataclass(frozen=True, eq=False)
class ToMainGrad:
    """Added in the dtype of the weight's `main_grad` to it; autograd gets None.

    It is written over where the weight has `overwrite_main_grad`, and by the first gradient of a first microbatch.
    Where the weight has `grad_added_to_main_grad`, it becomes True and autograd gets zeros, so that its hooks fire.
    """

    weight: Callable[[], Tensor | None]
    first: bool = False
    """Whether the forward is one of a first microbatch: the next gradient, of whichever call, overwrites."""

    waits = False

    def begin(self) -> None:
        weight = self.weight()
        if self.first and weight is not None:
            weight.duotone_overwrite = True  # type: ignore[attr-defined]

    def take(self, product: Product, dy: Tensor) -> Tensor | None:
        out, adds = self.place()
        product.compute_into(out, adds, dy.dtype)
        return self.filled(out)

    def place(self) -> Place:
        """Where the next gradient goes, and whether it is added."""
        weight = self._held()
        overwrites = vars(weight).get("duotone_overwrite", False) or getattr(weight, "overwrite_main_grad", False)
        return main_grad(weight), not overwrites

    def filled(self, out: Tensor) -> Tensor | None:
        """What autograd is given once the gradient is in its place, `out`."""
        weight = self._held()
        increment_version(out)  # kernels write to addresses
        vars(weight).pop("duotone_overwrite", None)
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape)

    def _held(self) -> Tensor:
        weight = self.weight()
        if weight is None:
            raise MissingPlaneError(
                "the weight is gone before its gradient was added to main_grad; keep its module alive"
            )
        return weight


def main_grad(weight: Any) -> Tensor:
    """The buffer that gradients of `weight` are added to. MissingPlaneError where there is none that can hold them."""
    found = weight.get_main_grad() if hasattr(weight, "get_main_grad") else getattr(weight, "main_grad", None)
    if isinstance(found, Tensor) and found.shape == weight.shape and found.device == weight.device:
        if found.dtype.is_floating_point and found.dtype.itemsize > 1 and not found.is_inference():
            return found
    got = "none" if found is None else type(found).__name__
    if isinstance(found, Tensor):
        got = f"{tuple(found.shape)} in {found.dtype} on {found.device}"
    needed = f"{tuple(weight.shape)} in floating point on {weight.device}"
    raise MissingPlaneError(f"fuse_wgrad_accumulation needs weight.main_grad of shape {needed}; got {got}")


@dataclass(frozen=True, eq=False)
class Deferred:
    """Saved until the module's `backward_dw` takes the oldest; autograd gets None."""

    queue: deque[tuple[Product, Tensor, Sink]]
    then: Sink = GRADIENT
    waits = True

    def begin(self) -> None:
        self.then.begin()

    def take(self, product: Product, dy: Tensor) -> Tensor | None:
        self.queue.append((product, dy.new_empty(0), self.then))
        return None
