"""A script: the cast of both planes, and copies, in Triton's interpreter on the CPU, against the plain stages.

Prints each difference, then how many comparisons were made. The interpreter's own conversions between floats are not
those of a GPU: they round ties away, truncate FP8 subnormals and bf16, drop carries into the exponent, and lose FP8's
NaN. So torch's replace them, and everything is compared bit for bit; how a GPU rounds is for tests/gpu to say.
"""

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from duotone import formats
from duotone.dispatch.casts import _new_cast
from duotone.formats import Format
from duotone.formats.elements import E4M3, E5M2
from duotone.kernels import rows
from duotone.kernels.cast import Cast
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
PAIRS = [
    *((name, name) for name in ("fp8_e4m3_tensor", "fp8_e5m2_row", "fp8_e4m3_tensor_pow2")),
    *((name, name) for name in ("fp8_e4m3_1x128", "fp8_e4m3_128x128_fp32", "mxfp8_e4m3", "mxfp8_e5m2_32x32")),
    *((name, name) for name in ("mxfp6_e2m3", "mxfp6_e3m2", "mxfp4")),
    ("fp8_e4m3_1x128", "fp8_e4m3_128x128"),
    ("mxfp4", "mxfp6_e3m2"),
    ("mxfp8_e4m3", "mxfp4"),
    ("fp8_e4m3_tensor", "mxfp6_e2m3"),
    ("mxfp4", "fp8_e4m3_row"),
]


def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Bits of one float type -> bits of another, to nearest even."""
    given = torch.from_numpy(np.ascontiguousarray(data).view(BYTES[data.itemsize])).view(TORCH[source])
    made = given.to(TORCH[target])
    return made.view(getattr(torch, f"uint{8 * made.itemsize}")).numpy()


def saturating(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """To FP8 as GPUs convert: infinities become the largest value, NaN has no sign."""
    if target in ELEMENTS:
        element = ELEMENTS[target]
        values = torch.from_numpy(np.ascontiguousarray(data).view(np.uint32)).view(torch.float32)
        return element.encode(values).view(torch.uint8).numpy()
    return convert(data, source, target, rounding)


def patched(tensor: Any, scope: Any, patch: Any = interpreter._patch_lang_tensor) -> None:
    """numpy 2 makes no integer of the one-element arrays that scalars are here."""
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def scalar(arg: Any, convert_other: Any = interpreter._implicit_cvt) -> Any:
    """Floats become fp32 scalars, as in a launch; the interpreter leaves them Python's."""
    if not isinstance(arg, float):
        return convert_other(arg)
    return tl.tensor(interpreter.TensorHandle(np.array([arg], dtype=np.float32), tl.float32), tl.float32)


def launched(
    self: Any, programs: int, tensors: Any, integers: Any = (), floats: Any = (), descriptors: Any = ()
) -> None:
    given = (*descriptors, *tensors, *integers, *floats)
    self.function.run(*given, grid=(programs,), warmup=False, **self.options)


@triton.jit
def rounded(value, DTYPE: tl.constexpr):
    """In place of the inline assembly of `activations.rounded`, which the interpreter has not."""
    return value.to(DTYPE).to(tl.float32)


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


Check = Iterator[tuple[str, Tensor, Tensor]]
"""What was compared, the kernel's result, its twin's."""


HOW = [(torch.bfloat16, True, None), (torch.float32, False, 1), (torch.float16, True, 0)]
"""The dtype of a matrix, whether what is not finite propagates, the dimension that is sharded."""


class Twice:
    """A matrix that is one of two shards; the other has twice the amaxes."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def max(self, amax: Tensor) -> Tensor:
        return 2 * amax


def twins(row: Format, col: Format, x: Tensor, propagate: bool, dim: int | None) -> Iterator[dict[str, Tensor]]:
    """The parts of both planes by the plain stages; `dim` is the sharded one."""
    along, across = (None, None) if dim is None else (Twice(dim), Twice(1 - dim))
    yield row.encode(x, shard=along, propagate=propagate)
    if col.is_derivable:
        parts = col.derive(col.encode(x, shard=along, propagate=propagate), x.shape[1])
        assert parts is not None
        yield parts
    else:
        yield col.encode(x.t(), plane="col", shard=across, propagate=propagate)


def casts() -> Check:
    """Even and odd sizes, one row, one column; infinities and NaN that propagate and that do not; shards.

    Ways take turns, so that each pair of formats meets each. With the argument "all" both sizes meet all of them.
    """
    x = awkward()
    shapes = {"even": x[:64, :128], "odd": x[1:, :143], "row": x[7:8], "column": x[:, :1]}
    for (i, pair), (at, (name, part)) in itertools.product(enumerate(PAIRS), enumerate(shapes.items())):
        row, col = (formats.get(one) for one in pair)
        ways = HOW if name in ("even", "odd") and "all" in sys.argv else [HOW[(i + at) % len(HOW)]]
        for dtype, propagate, dim in ways:
            matrix = part.to(dtype).contiguous()
            cast = _new_cast(row, col, dtype, propagate)
            assert isinstance(cast, Cast)
            planes = cast(matrix, shard=None if dim is None else Twice(dim))
            for side, got, want in zip(("row", "col"), planes, twins(row, col, matrix, propagate, dim), strict=True):
                assert got is not None and list(got) == list(want)
                label = f"{pair} {side} {name} {dtype} {propagate=} {dim=}"
                yield from ((f"{label} {part}", got[part], want[part]) for part in want)


def copies() -> Check:
    codes = torch.randint(0, 256, (70, 150), dtype=torch.uint8)
    yield "copy turned", rows.contiguous_rows(codes.t()), codes.t().contiguous()
    yield "copy gaps", rows.contiguous_rows(codes[::2, ::3]), codes[::2, ::3].contiguous()


def main() -> int:
    torch.manual_seed(1234)
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    builder = interpreter.InterpreterBuilder
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    interpreter._convert_float = saturating
    interpreter._patch_lang_tensor, interpreter._implicit_cvt = patched, scalar
    Launch.__call__ = launched  # type: ignore[method-assign]
    checks: tuple[Callable[[], Check], ...] = casts, copies
    count = wrong = 0
    for what, got, want in itertools.chain.from_iterable(check() for check in checks):
        count += 1
        if got.shape != want.shape or got.dtype != want.dtype or not torch.equal(bits(got), bits(want)):
            wrong += 1
            print(f"{what}: {int((bits(got) != bits(want)).sum()) if got.shape == want.shape else 'shape'} differ")
    print(f"{count} comparisons, {wrong} differ")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
