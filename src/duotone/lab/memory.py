"""How many bytes one training step holds: live storages, weights, and tensors saved for backward."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages that hold the values of `tensor`; those of its parts when it is a wrapper subclass."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from storages(getattr(tensor, name))
    else:
        yield tensor.untyped_storage()


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each storage once."""
    return sum({s._cdata: s.nbytes() for tensor in tensors for s in storages(tensor)}.values())


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of living storages while it is active; `peak` is their high-water mark.

    `held` are tensors that live before it starts. Memory that one operator takes and frees inside itself is
    not seen: the number counts tensors, not the allocator's blocks.
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._references: dict[int, weakref.ref] = {}
        for tensor in held:
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


@contextmanager
def saved_for_backward(known: Iterable[Tensor]) -> Iterator[dict[int, int]]:
    """Collect the storages that autograd saves inside the block, with their bytes, without those of `known`.

    What is saved lives until backward, so no two of its storages can share a key within one forward.
    """
    left_out = {s._cdata for tensor in known for s in storages(tensor)}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved.update({s._cdata: s.nbytes() for s in storages(tensor) if s._cdata not in left_out})
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


@dataclass
class StepMemory:
    """Bytes of one step: the high-water mark, the parameters, and what else forward saved for backward."""

    peak_bytes: int = 0
    weight_bytes: int = 0
    saved_activation_bytes: int = 0

    @contextmanager
    def forward(self, known: Iterable[Tensor]) -> Iterator[None]:
        """Wrap the forward pass of the step; tensors `known` to live anyway do not count as saved."""
        with saved_for_backward(known) as saved:
            yield
        self.saved_activation_bytes = sum(saved.values())


@contextmanager
def measure_step(parameters: Sequence[Tensor], held: Iterable[Tensor], device: torch.device) -> Iterator[StepMemory]:
    """Measure the training step inside the block.

    On CUDA the peak is the allocator's. Elsewhere it is the high-water mark of live storages, which begins
    with `parameters` and the other tensors `held` before the step (masters, moments, buffers).
    """
    memory = StepMemory(weight_bytes=total_bytes(parameters))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield memory
        memory.peak_bytes = torch.cuda.max_memory_allocated(device)
    else:
        with LiveStorages([*parameters, *held]) as live:
            yield memory
        memory.peak_bytes = live.peak
