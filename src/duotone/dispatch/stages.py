"""Which backend runs the stages of encode and decode for a tensor: the only place that binds formats to speed.

Candidates are asked in order; the first without a reason against it runs. All give the same bits.
"""

import torch
from torch import Tensor

from duotone.dispatch.casts import has_kernels
from duotone.dispatch.chunked import CHUNKED
from duotone.dispatch.compiled import COMPILED
from duotone.dispatch.compiler import compiler_reason
from duotone.formats import hadamard
from duotone.formats.geometry import TENSOR
from duotone.formats.stages import PLAIN, Stages

COMPILE_FROM = 1 << 15
"""Elements below which a compiled call costs the host more than the stage itself."""


def stages_for(x: Tensor) -> Stages:
    """The backend for a tensor of this device and size."""
    if torch.compiler.is_dynamo_compiling():
        return TRACED if x.device.type == "cpu" else PLAIN
    return PLAIN if x.device.type != "cpu" or x.numel() < COMPILE_FROM else _stages(x.numel())


def _stages(elements: int) -> Stages:
    """The backend of a CPU for so many elements."""
    if elements < COMPILE_FROM:
        return PLAIN
    # Under a dispatch mode Dynamo gives a function up for good, without a word.
    observed = torch._C._len_torch_dispatch_stack() > 0
    return CHUNKED if observed or compiler_reason() else COMPILED


def amax_of(x: Tensor) -> Tensor:
    """fp32 (1,): the largest magnitude in a matrix, NaN ignored, 0 if it is empty."""
    if has_kernels(x):
        from duotone.kernels.amax import tensor_amax

        return tensor_amax(x.contiguous()).max().reshape(1)
    return stages_for(x).amax(TENSOR.view(x)).reshape(1)


def compiled_casts() -> bool:
    """Whether casts of CPU tensors are compiled here, which needs a working C++ compiler."""
    return not compiler_reason()


class TracedStages(Stages):
    """`Stages` of code that is compiled for a CPU: plain, so that the compiler fuses them, but for two own ops.

    Inductor leaves out the roundings to bf16 of a rotation, and takes long over both.
    """

    def rotate(self, x: Tensor) -> Tensor:
        return torch.ops.duotone.rotate(x)

    def random_bytes(self, seed: Tensor, rows: int, cols: int, plane: int) -> Tensor:
        return torch.ops.duotone.random_bytes(seed, rows, cols, plane)


TRACED = TracedStages()


def _rotate(x: Tensor) -> Tensor:
    return stages_for(x).rotate(x)


def _random_bytes(seed: Tensor, rows: int, cols: int, plane: int) -> Tensor:
    return _stages(rows * cols).random_bytes(seed, rows, cols, plane)


def _empty_bytes(seed: Tensor, rows: int, cols: int, plane: int) -> Tensor:
    return seed.new_empty((rows, cols), dtype=torch.uint8)


_LIBRARY = torch.library.Library("duotone", "FRAGMENT")
_LIBRARY.define("rotate(Tensor x) -> Tensor")
_LIBRARY.define("random_bytes(Tensor seed, SymInt rows, SymInt cols, int plane) -> Tensor")
_LIBRARY.impl("rotate", _rotate, "CPU")
_LIBRARY.impl("rotate", hadamard.rotate, "Meta")
_LIBRARY.impl("random_bytes", _random_bytes, "CPU")
_LIBRARY.impl("random_bytes", _empty_bytes, "Meta")
