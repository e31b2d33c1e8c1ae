"""The target of casts and products: the kind of device, its architecture, and the version of CUDA."""

import functools
import importlib.util
import re
from dataclasses import dataclass

import torch

from duotone.errors import UserError
from duotone.formats import ROW, TENSOR, Block
from duotone.numbered import constant_in_traces

HOPPER = (9, 0)
KERNELS_SINCE = (8, 9)
"""The first compute capability that converts to FP8. Every kernel may do that."""
BLOCKS_SINCE = (12, 9)
"""The first CUDA whose cuBLAS multiplies FP8 with scales per row, to fp32 too, and per block on Hopper."""

ARCHITECTURES = 70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121
"""The compute capabilities of the GPUs that CUDA 12 and 13 compile for, from NVIDIA's guide to its compiler."""

Version = tuple[int, int]


@dataclass(frozen=True)
class Target:
    """A kind of device ("cpu", "cuda", ...). Of an NVIDIA GPU also the compute capability, else (0, 0).

    `cuda` is the version of CUDA that torch was built with, None without CUDA. A plan for a device without
    CUDA assumes a new cuBLAS.
    """

    device: str
    arch: Version = (0, 0)
    cuda: Version | None = None

    @property
    def runs_kernels(self) -> bool:
        """Whether kernels run: Triton is installed, and the device converts to FP8."""
        return self.arch >= KERNELS_SINCE and has_triton()

    @property
    def has_large_blocks(self) -> bool:
        """Whether a block of threads may have more than 200 KiB of shared memory."""
        return self.arch[0] in (9, 10)

    @property
    def has_new_cublas(self) -> bool:
        """Whether its cuBLAS multiplies FP8 with scales per row to fp32, and per block on Hopper."""
        return self.cuda is None or self.cuda >= BLOCKS_SINCE

    @property
    def scales_rows_to_fp32(self) -> bool:
        """Whether FP8 products with scales per row also give fp32. They give bf16 everywhere."""
        return self.arch[0] == HOPPER[0] and self.has_new_cublas


def target(device: str | torch.device) -> Target:
    """The target of a device, or of an architecture that need not be here, as "sm90". UserError for other names."""
    kind, _, index = str(device).partition(":")
    if match := re.fullmatch(r"sm_?(\d{1,2})(\d)a?", kind):
        if (number := int(match[1] + match[2])) not in ARCHITECTURES:
            raise UserError(f"no GPU has the architecture {kind!r}; known are sm{', sm'.join(map(str, ARCHITECTURES))}")
        return Target("cuda", divmod(number, 10), _built_with())
    if kind != "cuda":
        return Target(_device_kind(kind))
    if not index and torch.cuda.is_available():
        index = str(torch.cuda.current_device())
    return cuda_target(int(index or 0))


@functools.cache
def cuda_target(index: int) -> Target:
    """The target of a CUDA device. Devices of other makes, which torch also calls CUDA, have no arch."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return Target("cuda")
    return Target("cuda", torch.cuda.get_device_capability(index), _built_with())


@functools.cache
def runs_kernels(index: int) -> bool:
    """`Target.runs_kernels` of the device of a tensor, `Tensor.get_device()`."""
    return index >= 0 and cuda_target(index).runs_kernels


@constant_in_traces
def scales_rows_to_fp32(index: int) -> bool:
    """`Target.scales_rows_to_fp32` of the device of a tensor, `Tensor.get_device()`."""
    return index >= 0 and cuda_target(index).scales_rows_to_fp32


@constant_in_traces
def decodes_in_kernels(index: int) -> bool:
    """`runs_kernels`, also in a trace."""
    return runs_kernels(index)


@functools.cache
def has_triton() -> bool:
    """Whether Triton can be imported here; finding it does not import it."""
    return importlib.util.find_spec("triton") is not None


def _device_kind(kind: str) -> str:
    """The name of a kind of device of torch."""
    try:
        return torch.device(kind).type
    except RuntimeError:
        message = f"unknown architecture {kind!r}; write sm and a compute capability, as sm90, or a device of torch"
        raise UserError(message) from None


@functools.cache
def _built_with() -> Version | None:
    built = torch.version.cuda
    if built is None:
        return None
    major, minor = (int(n) for n in built.split(".")[:2])
    return major, minor


# bench/results/2026-11-21-h200-small-linear.jsonl, 8192 tokens: all lose at 2048 x 4096 and win at 4096 x 4096.
LEAST_WORK: dict[tuple[tuple[int, int], Block], int] = {
    ((9, 0), TENSOR): 4096 * 4096,
    ((9, 0), ROW): 4096 * 4096,
    ((9, 0), Block(1, 128)): 4096 * 4096,
}
"""K x N by compute capability and the block of a scale; 128x128 goes by its partner.

They hold for forward and backward without caches, host time included.
"""


def least_work(blocks: set[Block], target: Target) -> int:
    """The largest entry of `LEAST_WORK` for operands with these blocks; 0 without an entry."""
    return max(LEAST_WORK.get((target.arch, block), 0) for block in blocks)
