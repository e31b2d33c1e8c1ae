"""offload_activations: what forward saves for backward waits in pinned memory of the host."""

import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from duotone.errors import UserError
from duotone.tensor import QuantizedTensor

SMALLEST = 1 << 16
"""Bytes below which a tensor stays on the device, as scales do."""


class Saved:
    """The bytes of one storage: on the host, and on the device again once backward comes near."""

    def __init__(self, flat: Tensor, side: torch.cuda.Stream) -> None:
        """`flat` uint8 (bytes,) on the device; `side` is the stream of all copies."""
        self.side = side
        self.host = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=True)
        self.flat: Tensor | None = None
        side.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(side):
            self.host.copy_(flat, non_blocking=True)
        flat.record_stream(side)

    def fetch(self) -> None:
        """Enqueue the copy to the device. Memory from the pool of the side stream needs no wait for other kernels."""
        if self.flat is None:
            with torch.cuda.stream(self.side):
                self.flat = torch.empty_like(self.host, device=self.side.device)
                self.flat.copy_(self.host, non_blocking=True)
                self.arrived = self.side.record_event()

    def use(self) -> Tensor:
        """The bytes on the device, uint8 (bytes,), for the current stream."""
        self.fetch()
        assert self.flat is not None
        stream = torch.cuda.current_stream(self.flat.device)
        stream.wait_event(self.arrived)
        self.flat.record_stream(stream)
        return self.flat


class Handle(NamedTuple):
    """A saved tensor as a view of a storage; `number` counts storages in the order of forward."""

    saved: Saved
    number: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class offload_activations(torch.autograd.graph.saved_tensors_hooks):
    """In this region what forward saves for backward is copied to pinned memory, beside the computation.

    Backward copies it back, `ahead` storages before it asks. Planes are saved as codes and scales, so a quantized
    operand costs its bytes in its format. Two views of one memory are copied once. What stays on the device: the
    parameters of `model`, tensors on a CPU, and tensors of fewer than `smallest` bytes. Bits do not change.

    Raises UserError for an `ahead` or a `smallest` that is not an integer of at least 0.
    """

    def __init__(self, model: nn.Module | None = None, *, smallest: int = SMALLEST, ahead: int = 2) -> None:
        for name, value in (("ahead", ahead), ("smallest", smallest)):
            if type(value) is not int or value < 0:
                raise UserError(f"{name} is {value!r}; give an integer of at least 0")
        super().__init__(self._pack, self._unpack)
        self.model, self.smallest, self.ahead = model, smallest, ahead
        self._stay: set[int] = set()
        self._copies: dict[tuple[int, int], tuple[StorageWeakRef, weakref.ref[Saved], int]] = {}
        self._order: list[weakref.ref[Saved]] = []
        self._sides: dict[int, torch.cuda.Stream] = {}

    def __repr__(self) -> str:
        model = "" if self.model is None else f"{type(self.model).__name__}, "
        return f"offload_activations({model}smallest={self.smallest}, ahead={self.ahead})"

    def __enter__(self) -> None:
        tensors = () if self.model is None else _buffers(self.model)
        self._stay = {tensor.untyped_storage()._cdata for tensor in tensors}
        super().__enter__()

    def __exit__(self, *exception: object) -> None:
        self._copies.clear()  # storages may change from here on
        super().__exit__(*exception)

    def _pack(self, tensor: Tensor) -> Tensor | Handle:
        storage = tensor.untyped_storage()
        if not tensor.is_cuda or tensor.nbytes < self.smallest or storage._cdata in self._stay:
            return tensor
        saved, number = self._copy_of(tensor, storage)
        return Handle(saved, number, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _copy_of(self, tensor: Tensor, storage: torch.UntypedStorage) -> tuple[Saved, int]:
        key = storage._cdata, tensor._version
        entry = self._copies.get(key)
        if entry is not None and not entry[0].expired() and (saved := entry[1]()) is not None:
            return saved, entry[2]
        index = tensor.get_device()
        side = self._sides.get(index) or self._sides.setdefault(index, torch.cuda.Stream(index))
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        saved, number = Saved(flat, side), len(self._order)
        self._order.append(weakref.ref(saved))
        self._copies[key] = StorageWeakRef(storage), weakref.ref(saved), number
        return saved, number

    def _unpack(self, packed: Tensor | Handle) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        flat = packed.saved.use()
        for before in self._order[max(packed.number - self.ahead, 0) : packed.number]:
            if (saved := before()) is not None:
                saved.fetch()
        return flat.view(packed.dtype).as_strided(packed.size, packed.stride, packed.offset)


def _buffers(model: nn.Module) -> Iterator[Tensor]:
    """The plain tensors that hold the parameters and buffers of a model."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, QuantizedTensor):
            yield tensor
            continue
        for plane in tensor.planes:
            yield from () if plane is None else plane.parts.values()
