"""Where a weight gradient goes: to autograd, into `main_grad`, or into a queue for later."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from duotone.dispatch.rule import Place, Product
from duotone.errors import MissingPlaneError
from duotone.state.torch_private import graph_task_id, queue_callback


@dataclass(frozen=True, eq=False)
class Sink:
    """Takes the gradients of one weight. This one gives them to autograd, which accumulates them."""

    waits = False
    """Whether `take` leaves the product to a later call."""

    def begin(self) -> None:
        """A forward calls this if its gradient will come here."""

    def take(self, product: Product, dy: Tensor) -> Tensor | None:
        """Compute the gradient or queue it. Returns what autograd gets for the weight: here it, in the dtype of dy."""
        return product.compute(dy.dtype, dy.dtype)


GRADIENT = Sink()


@dataclass(frozen=True, eq=False)
class ToMainGrad(Sink):
    """Adds the gradient to the weight's `main_grad`, in the dtype of that; autograd gets None.

    - It overwrites if the weight has `overwrite_main_grad`, and with the first gradient of a first microbatch.
    - If the weight has `grad_added_to_main_grad`, that becomes True, and autograd gets zeros, so that its hooks fire.
    """

    weight: Callable[[], Tensor | None]
    first: bool = False
    """Whether this is the forward of a first microbatch. Then the next gradient overwrites, whichever call it is of."""

    def begin(self) -> None:
        weight = self.weight()
        if self.first and weight is not None:
            weight.duotone_overwrite = True  # type: ignore[attr-defined]

    def take(self, product: Product, dy: Tensor) -> Tensor | None:
        out, adds = self.place()
        product.compute_into(out, adds, dy.dtype)
        return self.filled(out)

    def place(self) -> Place:
        """The place of the next gradient, and whether it is added there."""
        weight = self._living_weight()
        overwrites = vars(weight).get("duotone_overwrite", False) or getattr(weight, "overwrite_main_grad", False)
        return main_grad(weight), not overwrites

    def filled(self, out: Tensor) -> Tensor | None:
        """The gradient for autograd after the real one was written to `out`."""
        weight = self._living_weight()
        increment_version(out)  # kernels write to addresses
        vars(weight).pop("duotone_overwrite", None)
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape)

    def _living_weight(self) -> Tensor:
        weight = self.weight()
        if weight is None:
            raise MissingPlaneError(
                "the weight is gone before its gradient was added to main_grad; keep its module alive"
            )
        return weight


def main_grad(weight: Tensor) -> Tensor:
    """The buffer that gradients of `weight` are added to. MissingPlaneError if there is none that fits."""
    get: Callable[[], object] | None = getattr(weight, "get_main_grad", None)
    buffer = get() if get is not None else getattr(weight, "main_grad", None)
    if isinstance(buffer, Tensor) and buffer.shape == weight.shape and buffer.device == weight.device:
        if buffer.dtype.is_floating_point and buffer.dtype.itemsize > 1 and not buffer.is_inference():
            return buffer
    got = "none" if buffer is None else type(buffer).__name__
    if isinstance(buffer, Tensor):
        got = f"{tuple(buffer.shape)} in {buffer.dtype} on {buffer.device}"
    expected = f"{tuple(weight.shape)} in floating point on {weight.device}"
    raise MissingPlaneError(f"fuse_wgrad_accumulation needs weight.main_grad of shape {expected}; got {got}")


class Waiting(NamedTuple):
    """A product that was put off, a tensor of its dtype and device, and who takes it."""

    product: Product
    like: Tensor
    then: Sink


class Queue(deque[Waiting]):
    """Products of one weight that were put off, the oldest first. Those of a backward come when it has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.task, self.left = -1, list[Waiting]()
        """The newest backward that left products, and these. What a failed one left goes with the next."""

    def put(self, waiting: Waiting) -> None:
        """Add a product when the backward that runs now ends without an error or an interrupt."""
        if self.task != graph_task_id():
            self.task, self.left = graph_task_id(), []
            queue_callback(partial(self.extend, self.left))
        self.left.append(waiting)


@dataclass(frozen=True, eq=False)
class Deferred(Sink):
    """Queues the product until the module's `backward_dw` takes the oldest; autograd gets None."""

    queue: Queue
    then: Sink = GRADIENT
    waits = True

    def begin(self) -> None:
        self.then.begin()

    def take(self, product: Product, dy: Tensor) -> Tensor | None:
        self.queue.put(Waiting(product, dy.new_empty(0), self.then))
        return None
