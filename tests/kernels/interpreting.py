"""A script: checks of kernels in Triton's interpreter on the CPU, in one process that serves all of them.

A kernel is interpreted or compiled for as long as its process lives, and a process takes seconds to start. Each line of
the input names the checks of a file, "casts" those of interpreted_casts.py, and may add "all". The answer is a line of
JSON: the number of comparisons, and what differs.

The interpreter's own conversions between floats are not those of a GPU: they round ties away, truncate FP8 subnormals
and bf16, drop carries into the exponent, and lose FP8's NaN. So torch's replace them, and everything is compared bit
for bit; how a GPU rounds is for tests/gpu to say.
"""

import dataclasses
import functools
import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined, those of Triton itself too

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton._utils import validate_block_shape
from triton.language.core import _unwrap_if_constexpr
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from duotone.dispatch import stages
from duotone.formats import Format
from duotone.formats.elements import E4M3, E5M2
from duotone.kernels.launch import Launch

TORCH = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
BYTES = {1: np.uint8, 2: np.uint16, 4: np.uint32}
ELEMENTS = {tl.float8e4nv: E4M3, tl.float8e5: E5M2}

Check = Iterator[tuple[str, Tensor, Tensor] | tuple[str, bool]]
"""What was compared, and the kernel's result and its twin's, or whether it is right."""


def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Bits of one float type -> bits of another, to nearest even. E4M3 saturates, with torch 2.11 too."""
    inputs = torch.from_numpy(np.ascontiguousarray(data).view(BYTES[data.itemsize])).view(TORCH[source])
    inputs = inputs.clamp(-448, 448) if target == tl.float8e4nv else inputs
    converted = inputs.to(TORCH[target])
    return converted.view(getattr(torch, f"uint{8 * converted.itemsize}")).numpy()


def saturating(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """To FP8 as GPUs convert: infinities become the largest value, NaN has no sign."""
    if target in ELEMENTS:
        element = ELEMENTS[target]
        values = torch.from_numpy(np.ascontiguousarray(data).view(np.uint32)).view(torch.float32)
        return element.encode(values).view(torch.uint8).numpy()
    return convert(data, source, target, rounding)


def splat(self: Any, type: Any, scalar: Any) -> Any:
    """Conditions stay conditions; Triton 3.9 makes integers of them, which its loads and stores then refuse."""
    return interpreter.TensorHandle(np.full(type.shape, scalar.data.item(), scalar.data.dtype), scalar.dtype.scalar)


def patched(tensor: Any, scope: Any, patch: Any = interpreter._patch_lang_tensor) -> None:
    """numpy 2 makes no integer of the one-element arrays that scalars are here."""
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def scalar(arg: Any, convert_other: Any = interpreter._implicit_cvt) -> Any:
    """Floats become fp32 scalars, as in a launch; the interpreter leaves them Python's."""
    if not isinstance(arg, float):
        return convert_other(arg)
    return tl.tensor(interpreter.TensorHandle(np.array([arg], dtype=np.float32), tl.float32), tl.float32)


@functools.cache
def extents(shape: tuple[int | tl.constexpr, ...]) -> tuple[tl.tuple, tl.constexpr, tl.tuple]:
    """The shape of a type, the number of elements, and the shape of a tensor."""
    sizes = tuple(_unwrap_if_constexpr(n) for n in shape)
    return tl.tuple(sizes), tl.constexpr(validate_block_shape(sizes)), tl.tuple([tl.constexpr(n) for n in sizes])


def init_type(self: Any, element_ty: Any, shape: Any) -> None:
    assert shape, "0d block_type is forbidden"
    self.element_ty, (self.shape, numel, _) = element_ty, extents(tuple(shape))
    self.numel = numel.value


def init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    _, self.numel, self.shape = extents(tuple(type.shape) if type.is_block() else ())


def broadcast(self: Any, left: Any, right: Any, general: Any = TritonSemantic.broadcast_impl_value) -> Any:
    """Tensors of one shape stay as they are."""
    shapes = [t.type.shape if t.type.is_block() else None for t in (left, right)]
    return (left, right) if shapes[0] is shapes[1] else general(self, left, right)


def launched(
    self: Any, programs: int, tensors: Any, integers: Any = (), floats: Any = (), descriptors: Any = ()
) -> None:
    arguments = (*[TensorDescriptor(*each) for each in descriptors], *tensors, *integers, *floats)
    self.function.run(*arguments, grid=(programs,), warmup=False, **self.options)


def replace() -> None:
    """The interpreter's conversions, minima and maxima by a GPU's, which drop NaN, and launches by interpreted ones.

    Triton's language is replaced once for each function. The interpreter does so at each call, and undoes it. Shapes
    are made once for equal sizes, and names of types when they are read; Triton spends half of the time on these.
    """
    builder = interpreter.InterpreterBuilder
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    builder.create_splat = splat
    interpreter._convert_float = saturating
    interpreter._patch_lang_tensor, interpreter._implicit_cvt = patched, scalar
    interpreter._patch_lang = functools.cache(interpreter._patch_lang)
    interpreter._get_np_dtype = functools.cache(interpreter._get_np_dtype)
    tl.block_type.__hash__ = tl.pointer_type.__hash__ = tl.dtype.__hash__
    tl.block_type.__init__, tl.tensor.__init__ = init_type, init_tensor
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    tl.block_type.to_ir = lambda self, builder: self
    TritonSemantic.broadcast_impl_value = broadcast
    interpreter._LangPatchScope.restore = lambda self: None
    Launch.__call__ = launched
    stages.COMPILE_FROM = 1 << 30  # plain torch on the CPU: tests/dispatch compares the bits of compiled casts


def awkward() -> Tensor:
    """fp32 (70, 150), more than one tile each way: zeros, subnormals, ties, infinities, NaN, huge and tiny rows."""
    x = torch.randn(70, 150)
    x[2] = 0
    x[3, 4:60] = -0.0
    x[4] *= 1e-40
    x[5] *= 1e37
    x[6] *= torch.logspace(-20, 20, 150)
    x[7] = torch.arange(150) / 16
    x[8, :2] = torch.tensor([0x7FC00000, -1], dtype=torch.int32).view(torch.float32)
    x[9, 7], x[66, 140] = float("inf"), -float("inf")
    x[12, 32:64] = float("nan")
    return x


def bits(t: Tensor) -> Tensor:
    """Bits, with all NaNs of one dtype made one."""
    if t.is_floating_point():
        t = torch.where(t.float().isnan(), torch.nan, t.float()).view(torch.int32)
    return t.contiguous()


def twice(amaxes: Sequence[Tensor | None], spans: Sequence[bool]) -> list[Tensor | None]:
    """The amaxes of a matrix that is one of two shards; those that span the shards are twice as large in the other."""
    return [2 * amax if is_shared and amax is not None else amax for amax, is_shared in zip(amaxes, spans, strict=True)]


def encoded(fmt: Format, x: Tensor, dim: int | None, *, propagate: bool = False, **options: Any) -> dict[str, Tensor]:
    """The parts of a matrix, or of one of two shards along `dim`, whose amaxes are twice as large in the other."""
    amax = None if dim is None else fmt.shared_amax(x, dim, propagate=propagate)
    return fmt.encode(x, amax=None if amax is None else 2 * amax, propagate=propagate, **options)


def difference(result: Tensor, want: Tensor) -> str:
    """Empty where dtype, shape and bits are equal."""
    if result.shape != want.shape or result.dtype != want.dtype:
        return f"{tuple(result.shape)} {result.dtype} for {tuple(want.shape)} {want.dtype}"
    differ = int((bits(result) != bits(want)).sum())
    return f"{differ} differ" if differ else ""


def answer(name: str, everything: bool) -> dict[str, Any]:
    """Run the checks of a file, with what the file replaces. Sums of integers are watched for overflow with "all"."""
    file = importlib.import_module(f"interpreted_{name}")
    torch.manual_seed(1234)
    count, wrong = 0, []
    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=everything)
    with mock.patch.object(interpreter.interpreter_builder, "options", options), ExitStack() as stack:
        for owner, attribute, value in getattr(file, "REPLACED", ()):
            stack.enter_context(mock.patch.object(owner, attribute, value))
        for what, *results in file.checks(everything):
            count += 1
            text = difference(*results) if len(results) == 2 else "" if results[0] else "wrong"
            wrong += [f"{what}: {text}"] if text else []
    return {"comparisons": count, "wrong": wrong}


if __name__ == "__main__":
    sys.modules["interpreting"] = sys.modules["__main__"]
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    replace()
    for line in sys.stdin:
        name, *more = line.split()
        print(json.dumps(answer(name, "all" in more)), flush=True)
