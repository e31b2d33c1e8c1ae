"""Stages compiled for the CPU by torch.compile, where a C++ compiler works.

Each (stage, element, layout) is a code object of its own, because Dynamo stops compiling a code object after a few
variants. Three stages instead of one fused encode: inductor would recompute a block's scale for each of its elements.
"""

import functools
import logging
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import TypeVar

import torch
import torch.fx.experimental._config as shapes_config
from torch import Tensor

from duotone.dispatch.compiler import backend
from duotone.formats import hadamard, philox, stages
from duotone.formats.elements import Element
from duotone.formats.stages import Stages

T = TypeVar("T")


def own_code(function: Callable[..., object], name: str) -> FunctionType:
    """A copy of `function` with a code object of its own, named `name`."""
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
        # Each of these would make variants: gradients required or not, and sizes that happen to be equal.
        plain = [a.detach() if isinstance(a, Tensor) else a for a in arguments]
        with torch.no_grad(), shapes_config.patch(use_duck_shape=False):  # type: ignore
            return compiled(*plain)

    return run


def _in_memory_order(blocks: Tensor) -> bool:
    """Whether the blocks' columns, rather than their rows, lie next to each other in memory."""
    return blocks.stride(3) == 1 or (blocks.shape[3] == 1 and blocks.stride(2) == 1)


def _lies_turned(blocks: Tensor) -> bool:
    """Whether rows, and not columns, lie next to each other; where neither do, as after expand, the stage copies."""
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
    """Sizes that blocks have are built for; the extents of whole matrices, which may be any, share one loop nest."""
    return str(n) if n <= 128 and n & (n - 1) == 0 else "n"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class CompiledStages(Stages):
    """`Stages` whose loops are C++. They run over contiguous memory; a transposed operand is turned, not copied."""

    name = "compiled C++"

    def amax(self, blocks: Tensor, nan: float = 0.0) -> Tensor:
        if _lies_turned(blocks):
            return self.amax(_turn(blocks), nan).t()
        run = _compile(stages.block_amax, _layout(blocks) + "_nan" * (nan != 0.0))
        return run(blocks.contiguous(), nan)

    def cast(self, blocks: Tensor, multiplier: Tensor, element: Element, marks: bool = False) -> Tensor:
        if _lies_turned(blocks):
            return _turn(self.cast(_turn(blocks), _turn(multiplier), element, marks))
        run = _compile(stages.cast, f"{element.name}_{_layout(blocks)}" + "_marked" * marks)
        return run(blocks.contiguous(), multiplier.contiguous(), element, marks)

    def cast_stochastic(self, blocks: Tensor, multiplier: Tensor, bits: Tensor, element: Element) -> Tensor:
        if _lies_turned(blocks):
            return _turn(self.cast_stochastic(_turn(blocks), _turn(multiplier), _turn(bits), element))
        run = _compile(stages.cast_stochastic, f"{element.name}_{_layout(blocks)}")
        return run(blocks.contiguous(), multiplier.contiguous(), bits.contiguous(), element)

    def values(self, codes: Tensor, factor: Tensor, element: Element, dtype: torch.dtype) -> Tensor:
        if _lies_turned(codes):
            return _turn(self.values(_turn(codes), _turn(factor), element, dtype))
        run = _compile(stages.values, f"{element.name}_{_layout(codes)}_{_short(dtype)}")
        return run(codes.contiguous(), factor.contiguous(), element, dtype)

    def exponent_scale(self, amax: Tensor, reciprocal: float) -> tuple[Tensor, Tensor]:
        if amax.stride(1) != 1 and amax.stride(0) == 1:
            code, multiplier = self.exponent_scale(amax.t(), reciprocal)
            return code.t(), multiplier.t()
        return _compile(stages.exponent_scale, str(reciprocal))(amax.contiguous(), reciprocal)

    def rotate(self, x: Tensor) -> Tensor:
        x = x.to(torch.bfloat16)  # here, because torch 2.11 drops this rounding where it compiles it
        down = x.stride(1) != 1 and x.t().is_contiguous()
        return _compile(hadamard.rotate, "down" if down else "across")(x if down else x.contiguous())

    def random_bytes(self, seed: Tensor, rows: int, cols: int, plane: int) -> Tensor:
        return _compile(philox.random_bytes, "")(seed, rows, cols, plane)


COMPILED = CompiledStages()
