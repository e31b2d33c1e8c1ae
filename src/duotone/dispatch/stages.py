"""The backends of the stages of encode and decode, and the choice among them: only this file binds formats to speed.

Candidates are asked in order; the first without a reason against it runs. All give the same bits.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import CodeType, FunctionType
from typing import TypeVar

import torch
import torch.fx.experimental._config as shapes_config
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from duotone.capture import is_capturing
from duotone.dispatch.casts import has_kernels
from duotone.dispatch.compiler import backend, compiler_reason
from duotone.formats import elements, hadamard, philox
from duotone.formats.elements import PLAIN, Element, Stages
from duotone.formats.geometry import TENSOR
from duotone.graph_ops import define_op

T = TypeVar("T")

COMPILE_FROM = 1 << 15
"""Below this number of elements a compiled call costs the host more than the stage."""


def stages_for(x: Tensor) -> Stages:
    """The backend for a tensor of this device and size."""
    if torch.compiler.is_dynamo_compiling() or isinstance(x, FunctionalTensor):
        return TRACED if x.device.type == "cpu" else PLAIN
    if x.device.type != "cpu":
        return PLAIN
    elements = x.numel()
    if isinstance(elements, torch.SymInt):
        return TRACED  # a comparison would be a guard of the program that torch.export writes
    return PLAIN if elements < COMPILE_FROM else _stages(elements)


def _stages(elements: int) -> Stages:
    """The backend of a CPU for this number of elements."""
    if elements < COMPILE_FROM:
        return PLAIN
    # Under a dispatch mode Dynamo never compiles the function again, and does not say so.
    observed = torch._C._len_torch_dispatch_stack() > 0
    return CHUNKED if observed or _UNCOMPILED.get() or compiler_reason() else COMPILED


_UNCOMPILED = ContextVar("uncompiled", default=False)


@contextmanager
def uncompiled(applies: bool = True) -> Iterator[None]:
    """In this thread casts on the CPU are not compiled. For work that takes less time and memory than the compiler."""
    token = _UNCOMPILED.set(applies)
    try:
        yield
    finally:
        _UNCOMPILED.reset(token)


def amax_of(x: Tensor) -> Tensor:
    """fp32 (1,): the largest magnitude in a matrix, NaN ignored, 0 if it is empty."""
    if has_kernels(x):
        from duotone.kernels.amax import tensor_amax

        return tensor_amax(x.contiguous()).max().reshape(1)
    return stages_for(x).amax(TENSOR.view(x)).reshape(1)


def amaxes_of(matrices: Sequence[Tensor]) -> list[Tensor]:
    """`amax_of` each matrix, in one launch on CUDA if they are contiguous, aligned and of one dtype.

    A graph that captures has a launch for each, because it may not read a table of addresses that others free.
    """
    kind = matrices[0].dtype, matrices[0].device
    plain = all([has_kernels(x) and x.is_contiguous() and (x.dtype, x.device) == kind for x in matrices])
    if plain and not is_capturing() and not any([x.data_ptr() % 16 for x in matrices]):
        from duotone.kernels.amax import amaxes

        return [*torch.split(amaxes(matrices), 1)]
    return [amax_of(x) for x in matrices]


def compiled_casts() -> bool:
    """Whether casts of CPU tensors are compiled here, which needs a working C++ compiler."""
    return not compiler_reason()


def own_code(function: Callable[..., object], name: str) -> FunctionType:
    """A copy of `function` with another code object, named `name`."""
    assert isinstance(function, FunctionType)
    code: CodeType = function.__code__.replace(co_name=name, co_qualname=name)
    return FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


@functools.cache
def _compile(function: Callable[..., T], key: str) -> Callable[..., T]:
    """`function` compiled under a name that says what it is for; dynamic in the sizes of its tensors."""
    name = f"duotone_{function.__name__}_{key}"
    logging.getLogger(__name__).debug("compiling %s", name)
    compiled = torch.compile(own_code(function, name), dynamic=True, backend=backend)

    def run(*arguments: object) -> T:
        # Else a tensor that requires gradients, or sizes that are equal by chance, would compile another variant.
        plain = [a.detach() if isinstance(a, Tensor) else a for a in arguments]
        with torch.no_grad(), shapes_config.patch(use_duck_shape=False):  # type: ignore
            return compiled(*plain)

    return run


def _in_memory_order(blocks: Tensor) -> bool:
    """Whether the blocks' columns, rather than their rows, lie next to each other in memory."""
    return blocks.stride(3) == 1 or (blocks.shape[3] == 1 and blocks.stride(2) == 1)


def _lies_turned(blocks: Tensor) -> bool:
    """Whether rows, and not columns, lie next to each other. If neither do, as after expand, the stage copies."""
    return not _in_memory_order(blocks) and _in_memory_order(_turn(blocks))


def _turn(blocks: Tensor) -> Tensor:
    """Exchange rows and columns of a blocked tensor; every stage treats the two alike."""
    return blocks.permute(2, 3, 0, 1)


def _layout(blocks: Tensor) -> str:
    """Block sizes and dtype: what a compiled loop nest is built for."""
    rows, cols = blocks.shape[1], blocks.shape[3]
    whole = "_whole" * (blocks.shape[0] == 1) + "_one" * (blocks.shape[2] == 1)
    return f"{_extent(rows)}x{_extent(cols)}{whole}_{_short(blocks.dtype)}"


def _extent(n: int) -> str:
    """Block sizes have a loop nest each. The extents of whole matrices share one."""
    return str(n) if n <= 128 and n & (n - 1) == 0 else "n"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class CompiledStages(Stages):
    """`Stages` whose loops are C++. They run over contiguous memory; a transposed operand is turned, not copied.

    Each (stage, element, layout) has a separate code object, because Dynamo stops compiling a code object after a few
    variants. There are three stages instead of one fused encode, in which inductor would compute the scale of a block
    again for each element.
    """

    name = "compiled C++"

    def amax(self, blocks: Tensor, nan: float = 0.0) -> Tensor:
        if _lies_turned(blocks):
            return self.amax(_turn(blocks), nan).t()
        run = _compile(elements.block_amax, _layout(blocks) + "_nan" * (nan != 0.0))
        return run(blocks.contiguous(), nan)

    def cast(self, blocks: Tensor, multiplier: Tensor, element: Element, marks: bool = False) -> Tensor:
        if _lies_turned(blocks):
            return _turn(self.cast(_turn(blocks), _turn(multiplier), element, marks))
        run = _compile(elements.cast, f"{element.name}_{_layout(blocks)}" + "_marked" * marks)
        return run(blocks.contiguous(), multiplier.contiguous(), element, marks)

    def cast_stochastic(self, blocks: Tensor, multiplier: Tensor, bits: Tensor, element: Element) -> Tensor:
        if _lies_turned(blocks):
            return _turn(self.cast_stochastic(_turn(blocks), _turn(multiplier), _turn(bits), element))
        run = _compile(elements.cast_stochastic, f"{element.name}_{_layout(blocks)}")
        return run(blocks.contiguous(), multiplier.contiguous(), bits.contiguous(), element)

    def values(self, codes: Tensor, factor: Tensor, element: Element, dtype: torch.dtype) -> Tensor:
        if _lies_turned(codes):
            return _turn(self.values(_turn(codes), _turn(factor), element, dtype))
        run = _compile(elements.values, f"{element.name}_{_layout(codes)}_{_short(dtype)}")
        return run(codes.contiguous(), factor.contiguous(), element, dtype)

    def exponent_scale(self, amax: Tensor, reciprocal: float) -> tuple[Tensor, Tensor]:
        if amax.stride(1) != 1 and amax.stride(0) == 1:
            code, multiplier = self.exponent_scale(amax.t(), reciprocal)
            return code.t(), multiplier.t()
        return _compile(elements.exponent_scale, str(reciprocal))(amax.contiguous(), reciprocal)

    def rotate(self, x: Tensor) -> Tensor:
        x = x.to(torch.bfloat16)  # here: torch 2.11 drops this rounding in compiled code
        down = x.stride(1) != 1 and x.t().is_contiguous()
        return _compile(hadamard.rotate, "down" if down else "across")(x if down else x.contiguous())

    def random_bytes(self, seed: Tensor, rows: int, cols: int, plane: int) -> Tensor:
        return _compile(philox.random_bytes, "")(seed, rows, cols, plane)


COMPILED = CompiledStages()


CHUNK = 1 << 16
"""Elements of a piece. With its fp32 temporaries it fits into a second-level cache of 1 MiB."""


def _pieces(blocks: Tensor) -> tuple[int, int]:
    """The dimension to cut and the blocks of a piece. It is 0 or 2: the one with the larger stride, in whole blocks."""
    dim = 0 if blocks.shape[2] == 1 or (blocks.shape[0] > 1 and blocks.stride(0) >= blocks.stride(2)) else 2
    per_block = max(1, blocks.numel() // max(1, blocks.shape[dim]))
    return dim, max(1, CHUNK // per_block)


def _chunked(stage: Callable[..., Tensor], blocks: Tensor, *others: Tensor) -> Tensor:
    """Run an elementwise stage piece by piece; `others` broadcast to the blocks. Keeps the strides of `blocks`."""
    dim, step = _pieces(blocks)
    extent = blocks.shape[dim]
    out: Tensor | None = None
    for start in range(0, extent, step):
        length = min(step, extent - start)
        cut = [t.narrow(dim, start, length) if t.dim() == 4 and t.shape[dim] == extent else t for t in others]
        piece = stage(blocks.narrow(dim, start, length), *cut)
        if out is None:
            out = torch.empty_like(blocks, dtype=piece.dtype)
        out.narrow(dim, start, length).copy_(piece)
    return stage(blocks, *others) if out is None else out


class ChunkedStages(Stages):
    """`Stages` for machines without a C++ compiler: element-wise stages run on pieces that fit the caches."""

    name = "torch, in cache-sized pieces"

    def amax(self, blocks: Tensor, nan: float = 0.0) -> Tensor:
        if blocks.shape[0] * blocks.shape[2] == 1:
            flat = blocks.reshape(-1) if blocks.is_contiguous() else blocks.squeeze().t().reshape(-1)
            pieces = [PLAIN.amax(piece.view(1, 1, 1, -1), nan) for piece in torch.split(flat, CHUNK)]
            return torch.stack(pieces).amax(dim=0)
        dim, step = _pieces(blocks)
        pieces = [PLAIN.amax(piece, nan) for piece in torch.split(blocks, step, dim)]
        return torch.cat(pieces, dim=0 if dim == 0 else 1)

    def cast(self, blocks: Tensor, multiplier: Tensor, element: Element, marks: bool = False) -> Tensor:
        return _chunked(partial(PLAIN.cast, element=element, marks=marks), blocks, multiplier)

    def cast_stochastic(self, blocks: Tensor, multiplier: Tensor, bits: Tensor, element: Element) -> Tensor:
        return _chunked(partial(PLAIN.cast_stochastic, element=element), blocks, multiplier, bits)

    def values(self, codes: Tensor, factor: Tensor, element: Element, dtype: torch.dtype) -> Tensor:
        return _chunked(partial(PLAIN.values, element=element, dtype=dtype), codes, factor)

    def rotate(self, x: Tensor) -> Tensor:
        rows = max(1, CHUNK // max(1, x.shape[1]))
        return torch.cat([PLAIN.rotate(piece) for piece in torch.split(x, rows)])


CHUNKED = ChunkedStages()


class TracedStages(Stages):
    """`Stages` of code that is compiled for a CPU: plain, so that the compiler fuses them, except for two ops.

    Inductor would leave out the roundings to bf16 of a rotation, and takes long to compile random bytes.
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


_BYTES = "random_bytes(Tensor seed, SymInt rows, SymInt cols, int plane) -> Tensor"
define_op("rotate(Tensor x) -> Tensor", _rotate, hadamard.rotate, devices=("CPU",))
define_op(_BYTES, _random_bytes, _empty_bytes, devices=("CPU",))
