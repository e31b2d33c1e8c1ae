"""Which backend runs the stages of encode and decode for a tensor: the only place that binds formats to speed.

Candidates are asked in order; the first without a reason against it runs. All give the same bits.
"""

import torch
from torch import Tensor

from duotone.dispatch.chunked import CHUNKED
from duotone.dispatch.compiled import COMPILED, compiler_reason
from duotone.dispatch.cuda import CUDA, runs_kernels
from duotone.formats.geometry import TENSOR
from duotone.formats.stages import PLAIN, Stages

COMPILE_FROM = 1 << 15
"""Elements below which a compiled call costs the host more than the stage itself."""


def stages_for(x: Tensor) -> Stages:
    """The backend for a tensor of this device and size."""
    if torch.compiler.is_compiling():
        return PLAIN
    if x.device.type == "cuda" and runs_kernels():
        return CUDA
    if x.numel() < COMPILE_FROM or x.device.type != "cpu":
        return PLAIN
    # Under a dispatch mode Dynamo gives a function up for good, without a word.
    observed = torch._C._len_torch_dispatch_stack() > 0
    return CHUNKED if observed or compiler_reason() else COMPILED


def amax_of(x: Tensor) -> Tensor:
    """fp32 (1,): the largest magnitude in a matrix, NaN ignored, 0 where it is empty."""
    return stages_for(x).amax(TENSOR.view(x)).reshape(1)


def compiled_casts() -> bool:
    """Whether casts of CPU tensors are compiled here, which needs a working C++ compiler."""
    return not compiler_reason()
