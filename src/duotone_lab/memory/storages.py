"""Storages: what tensors cost in bytes, which of them live at once, and which the modules of a model own."""

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from duotone.observe.unchanged import device_of
from duotone.state.delayed import DelayedState
from duotone.tensor.plane import Plane


def tensors_in(values: object) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages that hold the values of `tensor`. For a wrapper subclass, those of its parts."""
    if is_traceable_wrapper_subclass(tensor):
        for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
            if isinstance(part, Tensor):  # a DTensor names its mesh too
                yield from storages(part)
    else:
        yield tensor.untyped_storage()


def sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of the storages behind `tensors`, by a number that identifies a storage as long as it lives."""
    return {s._cdata: s.nbytes() for tensor in tensors for s in storages(tensor)}


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each storage once."""
    return sum(sizes(tensors).values())


class AllocatorPeak:
    """The high-water mark of the CUDA allocator while it is active, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.peak = device, 0

    def __enter__(self) -> Self:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return self

    def __exit__(self, *error: object) -> None:
        self.peak = torch.cuda.max_memory_allocated(self.device)


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
        for tensor in tensors_in(result):
            self._add(tensor)
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


def peak_of(living: Iterable[Tensor], device: torch.device) -> AllocatorPeak | LiveStorages:
    """What measures the peak of a block: the allocator on CUDA, elsewhere live storages, which begin with `living`."""
    return AllocatorPeak(device) if device.type == "cuda" else LiveStorages(living)


@dataclass
class Holdings:
    """Bytes of weights and caches by module name, each storage with its first owner; `sizes` is by storage."""

    weights: dict[str, int] = field(default_factory=dict)
    caches: dict[str, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)

    def enter(self, column: dict[str, int], owner: str, tensor: Tensor) -> None:
        """Add the storages of a tensor that no owner has yet to this owner."""
        new = {key: size for key, size in sizes([tensor]).items() if key not in self.sizes}
        self.sizes.update(new)
        self.tensors.append(tensor)
        column[owner] = column.get(owner, 0) + sum(new.values())


def holdings(model: nn.Module) -> Holdings:
    """Parameters are weights. Caches are all other tensors that modules and parameters hold: buffers, delayed-scaling
    states (owned by their linear), seeds, cached planes, preserved values; gradients are neither."""
    result = Holdings()
    device = device_of(model)
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            result.enter(result.weights, name, parameter)
    for name, module in model.named_modules():
        owner = name.rpartition(".")[0] if isinstance(module, DelayedState) else name
        attributes = [value for key, value in vars(module).items() if key not in ("_parameters", "_modules")]
        beside = [list(vars(parameter).values()) for parameter in module.parameters(recurse=False)]
        for tensor in _tensors([attributes, beside]):
            if tensor.device.type == device.type:
                result.enter(result.caches, owner, tensor)
    return result


def _tensors(values: object) -> Iterator[Tensor]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Plane):
            yield from leaf.parts.values()
