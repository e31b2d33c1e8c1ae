"""How many bytes one training step holds: live storages, weights, and tensors saved for backward."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from duotone_lab.memory.storages import peak_of, sizes, total_bytes


@dataclass
class StepMemory:
    """Bytes of one step: the peak, the parameters, and other tensors that forward saved for backward."""

    peak_bytes: int = 0
    weight_bytes: int = 0
    saved_activation_bytes: int = 0

    @contextmanager
    def forward(self, excluded: Iterable[Tensor]) -> Iterator[None]:
        """Wrap the forward pass of the step. Tensors of `excluded` live anyway and do not count as saved."""
        left_out = set(sizes(excluded))
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            # What is saved lives until backward, so no two of its storages can share a key within one forward.
            saved.update({key: size for key, size in sizes([tensor]).items() if key not in left_out})
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self.saved_activation_bytes = sum(saved.values())


@contextmanager
def measure_step(parameters: Sequence[Tensor], other: Iterable[Tensor], device: torch.device) -> Iterator[StepMemory]:
    """Measure the training step inside the block.

    On CUDA the peak is the allocator's. Elsewhere it is the high-water mark of live storages, which begins
    with `parameters` and the other tensors `other` before the step (masters, moments, buffers).
    """
    memory = StepMemory(weight_bytes=total_bytes(parameters))
    with peak_of([*parameters, *other], device) as measured:
        yield memory
    memory.peak_bytes = measured.peak
