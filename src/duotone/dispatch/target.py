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

GPUS = {
    **dict.fromkeys(("a100", "a800", "a30"), 80),
    **dict.fromkeys(("a10", "a10g", "a40", "a6000", "3080", "3090"), 86),
    **dict.fromkeys(("l4", "l40", "l40s", "4070", "4080", "4090"), 89),
    **dict.fromkeys(("h100", "h200", "h800", "h20", "gh200"), 90),
    **dict.fromkeys(("b100", "b200", "gb200"), 100),
    **dict.fromkeys(("b300", "gb300"), 103),
    **dict.fromkeys(("5070", "5080", "5090", "pro6000"), 120),
}
"""GPUs by name, and their compute capabilities, from NVIDIA's list of GPUs for CUDA."""
_BRANDS = re.compile(r"nvidia|geforce|tesla|rtx|[\s_-]")

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

    def __str__(self) -> str:
        return self.device if self.arch == (0, 0) else f"{self.device} sm{self.arch[0]}{self.arch[1]}"

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
    """The target of a device, or of a GPU that need not be here: "sm90", "H100". UserError for other names."""
    kind, _, index = str(device).partition(":")
    kind = f"sm{number}" if (number := GPUS.get(_BRANDS.sub("", kind.lower()))) else kind
    if match := re.fullmatch(r"sm_?(\d{1,2})(\d)a?", kind):
        arch = int(match[1]), int(match[2])
        if 10 * arch[0] + arch[1] not in ARCHITECTURES:
            raise UserError(f"no GPU has the architecture {kind!r}; known are sm{', sm'.join(map(str, ARCHITECTURES))}")
        return Target("cuda", arch, _built_with())
    if kind != "cuda" or not (index or "0").isdigit():
        return Target(_device_kind(str(device)))
    if not index and torch.cuda.is_available():
        index = str(torch.cuda.current_device())
    return cuda_target(int(index or 0))


def require_here(device: str) -> None:
    """Raise UserError if `device` is a CUDA device that this machine lacks. What it would run is then unknown.

    A GPU's name asks for no device, and CUDA devices of other makes have no architecture.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    match = re.fullmatch(r"cuda(?::(\d+))?", device)
    if match and int(match[1] or 0) >= count:
        here = f"{count} CUDA devices are here" if count else "no CUDA device is here"
        raise UserError(f'device is {device!r}, and {here}; name the GPU to plan for: "sm90", "H100", "4090"')


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
        remedy = "write sm and a compute capability, as sm90, a GPU's name, as H100, or a device of torch"
        message = f"unknown architecture {kind!r}; {remedy}"
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
