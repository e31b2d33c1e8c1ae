"""Storages: what tensors cost in bytes, and which of them live at once."""

import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages that hold the values of `tensor`; those of its parts when it is a wrapper subclass."""
    if is_traceable_wrapper_subclass(tensor):
        for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
            if isinstance(part, Tensor):  # a DTensor names its mesh too
                yield from storages(part)
    else:
        yield tensor.untyped_storage()


def sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of the storages behind `tensors` by storage, which has no other name while it lives."""
    return {s._cdata: s.nbytes() for tensor in tensors for s in storages(tensor)}


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each storage once."""
    return sum(sizes(tensors).values())


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of living storages while it is active; `peak` is their high-water mark.

    `living` are tensors that exist before it starts. Memory that one operator takes and frees itself is not counted:
    the number counts tensors, not blocks of the allocator.
    """

    def __init__(self, living: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._references: dict[int, weakref.ref] = {}
        for tensor in living:
            self._add(tensor)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return result

    def _add(self, tensor: Tensor) -> None:
        for storage in storages(tensor):
            key, size = storage._cdata, storage.nbytes()
            if key in self._references:
                continue

            def free(_: weakref.ref, key: int = key, size: int = size) -> None:
                del self._references[key]
                self.live -= size

            self._references[key] = weakref.ref(storage, free)
            self.live += size
            self.peak = max(self.peak, self.live)
