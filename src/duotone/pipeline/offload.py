"""offload_activations: tensors that forward saves for backward wait in pinned memory of the host."""

import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from duotone.dispatch.casts import PLAIN_TYPES
from duotone.errors import UserError, require_integers
from duotone.tensor import QuantizedTensor

SMALLEST = 1 << 16
"""Tensors of fewer bytes stay on the device, such as scales."""


class Copy:
    """A saved tensor: on the host, and on the device again shortly before backward needs it."""

    def __init__(self, tensor: Tensor, side: torch.cuda.Stream, before: "Copy | None") -> None:
        """`side` is the stream of all copies, `before` the copy that forward made before this one."""
        self.side, self.before = side, None if before is None else weakref.ref(before)
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self.returned: Tensor | None = None
        side.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(side):
            self.host.copy_(tensor, non_blocking=True)
        tensor.record_stream(side)

    def fetch(self) -> None:
        """Enqueue the copy to the device. Its memory is of the side stream's pool, so it waits for no other kernel."""
        if self.returned is None:
            with torch.cuda.stream(self.side):
                self.returned = torch.empty_like(self.host, device=self.side.device)
                self.returned.copy_(self.host, non_blocking=True)
                self.arrival = self.side.record_event()

    def use(self, ahead: int) -> Tensor:
        """The tensor on the device, for the current stream. Also fetches the `ahead` copies before it."""
        self.fetch()
        before = self.before and self.before()
        for _ in range(ahead):
            if before is None:
                break
            before.fetch()
            before = before.before and before.before()
        assert self.returned is not None
        stream = torch.cuda.current_stream(self.returned.device)
        stream.wait_event(self.arrival)
        self.returned.record_stream(stream)
        return self.returned


class OnDevice(NamedTuple):
    """A saved tensor that stays on its device, and its version, which torch does not check under hooks."""

    tensor: Tensor
    version: int


class offload_activations(torch.autograd.graph.saved_tensors_hooks):
    """In this region what forward saves for backward is copied to pinned memory, beside the computation.

    Backward copies each one back `ahead` tensors before it needs it. Planes are saved as codes and scales, so a
    quantized operand costs the bytes of its format. The parameters and buffers of `model`, tensors on a CPU, sparse
    tensors, and those of fewer than `smallest` bytes are not copied. Bits do not change.

    Raises UserError for a `model` that is no module, and for an `ahead` or a `smallest` that is not an integer of at
    least 0. Backward raises RuntimeError if a tensor that stayed was changed in place since.
    """

    def __init__(self, model: nn.Module | None = None, *, smallest: int = SMALLEST, ahead: int = 2) -> None:
        if not isinstance(model, nn.Module | None):
            raise UserError(f"offload_activations takes a torch.nn.Module; got {type(model).__name__}")
        require_integers(0, ahead=ahead, smallest=smallest)
        super().__init__(self._pack, self._unpack)
        self.model, self.smallest, self.ahead = model, smallest, ahead
        self._stay: set[int] = set()
        self._sides: dict[int, torch.cuda.Stream] = {}
        self._newest: weakref.ref[Copy] | None = None

    def __repr__(self) -> str:
        model = "" if self.model is None else f"{type(self.model).__name__}, "
        return f"offload_activations({model}smallest={self.smallest}, ahead={self.ahead})"

    def __enter__(self) -> None:
        tensors = () if self.model is None else _buffers(self.model)
        self._stay = {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided}
        super().__enter__()

    def _pack(self, tensor: Tensor) -> Copy | OnDevice:
        # A graph that holds its own output would never be freed.
        tensor = tensor if tensor.is_leaf else tensor.detach()
        plain = type(tensor) in PLAIN_TYPES and tensor.is_cuda and tensor.layout is torch.strided
        if not plain or tensor.nbytes < self.smallest or tensor.untyped_storage()._cdata in self._stay:
            return OnDevice(tensor, _version(tensor))
        index = tensor.get_device()
        side = self._sides.get(index) or self._sides.setdefault(index, torch.cuda.Stream(index))
        copy = Copy(tensor, side, self._newest and self._newest())
        self._newest = weakref.ref(copy)
        return copy

    def _unpack(self, packed: Copy | OnDevice) -> Tensor:
        if isinstance(packed, Copy):
            return packed.use(self.ahead)
        if _version(packed.tensor) != packed.version:
            raise RuntimeError(
                f"a tensor {tuple(packed.tensor.shape)} that backward needs was changed in place after forward, "
                f"{packed.tensor._version - packed.version} times; change a clone of it"
            )
        return packed.tensor


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _buffers(model: nn.Module) -> Iterator[Tensor]:
    """The plain tensors that hold the parameters and buffers of a model."""
    for tensor in (*model.parameters(), *model.buffers()):
        yield from tensor.planes.buffers if isinstance(tensor, QuantizedTensor) else (tensor,)
