"""Checks: the NVFP4 casts, their decoding and the epilogue of products, against their twins.

With `everything` each matrix meets each choice; else each two choices meet. Besides conversions, these of a GPU are
replaced: NaN without a sign, a fused product and sum rounded down, bf16 by twos.
"""

import itertools
from typing import Any

import numpy as np
import torch
import triton.language as tl
from interpreting import Check, awkward, convert, encoded, twice
from torch import Tensor
from triton.runtime import interpreter

from duotone import formats
from duotone.dispatch import casts
from duotone.dispatch.products import finish, scaled
from duotone.formats import Factors, Format
from duotone.kernels import decode_nvfp4, e2m1, epilogue

SEED = 0x1234567890ABCDEF
NAMES = [name for name in formats.names() if name.startswith("nvfp4")]
SAME_BUT_448 = [name for name in NAMES if "_448" in name]
DTYPES = torch.bfloat16, torch.float32, torch.float16


class Libdevice:
    @staticmethod
    def fma_rz(a: Any, b: float, c: Any) -> Any:
        """Of magnitudes, onto 2^23: what lies above it is rounded down, and small enough for fp64 to hold."""
        above = float(getattr(c, "value", c)) - 2.0**23
        floor = np.floor(np.minimum(a.handle.data.astype(np.float64) * b, 1e6) + above)
        return tl.tensor(interpreter.TensorHandle((floor + 2.0**23).astype(np.float32), tl.float32), a.type)


def product(value: Any, q: Any) -> Any:
    result = value * q
    return tl.where(result == result, result, float("nan"))


def bf16_pair(low: Any, high: Any) -> Any:
    halves = [half.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32) for half in (low, high)]
    return (halves[0] | (halves[1] << 16)).to(tl.int32, bitcast=True)


REPLACED = [
    (interpreter, "_convert_float", convert),
    (e2m1, "libdevice", Libdevice),
    (e2m1, "product", product),
    (e2m1, "bf16_pair", bf16_pair),
    (decode_nvfp4, "bf16_pair", bf16_pair),
]


def twins(row: Format | None, col: Format | None, x: Tensor) -> list[dict[str, Tensor] | None]:
    """The parts of both planes by the plain stages."""
    results = [None if row is None else row.encode(x, seed=SEED)]
    if col is None:
        return [*results, None]
    if col.is_derivable:
        return [*results, col.derive(col.encode(x, seed=SEED), x.shape[1])]
    return [*results, col.encode(x.t(), seed=SEED, plane="col")]


def planes(everything: bool) -> Check:
    """A matrix of words with infinities and NaN, one of odd sizes, one near the largest numbers, one column.

    Formats that differ from another one in a constant alone take the first matrix. Of odd sizes only the columnwise
    plane is cast, if a kernel casts it alone.
    """
    x = awkward()
    huge = torch.randn(17, 40) * 1e30
    inputs = [(x[:64, :112].bfloat16(), "whole"), (x[1:, :47].half(), "odd"), (x[:, :1], "column"), (huge, "huge")]
    for name, (matrix, what) in itertools.product(NAMES, inputs):
        fmt, matrix = formats.get(name), matrix.contiguous()
        if (what == "huge" and not fmt.scale_search) or (what == "column" and fmt.scale_search):
            continue
        if what != "whole" and name in SAME_BUT_448:
            continue
        sides = (
            ((fmt, fmt), (None, fmt))
            if everything
            else ((None if what == "odd" and not fmt.is_derivable else fmt, fmt),)
        )
        for row, col in sides:
            cast = casts._two_level_cast(row, col, row is not None and fmt.is_derivable, False)
            if cast is None:
                assert row is None and fmt.is_derivable
                continue
            result = cast(matrix, seed=torch.tensor([SEED]))
            for side, output, want in zip(("row", "col"), result, twins(row, col, matrix), strict=True):
                if output is None or want is None:
                    assert output is want
                    continue
                assert list(output) == list(want)
                yield from ((f"{name} {side} {part} {what} {matrix.dtype}", output[part], want[part]) for part in want)


def shards() -> Check:
    """A matrix that is one of two shards; amaxes of both planes are those of both shards."""
    x = torch.randn(32, 48).bfloat16()
    for at, name in enumerate(name for name in NAMES if name not in SAME_BUT_448):
        fmt, dim, seed = formats.get(name), at % 2, {"seed": SEED}
        cast = casts._two_level_cast(fmt, fmt, fmt.is_derivable)
        result = cast(x, amaxes=twice(*cast.measure(x, dim)), seed=torch.tensor([SEED]))
        row = encoded(fmt, x, dim, **seed)
        col = fmt.derive(row, 48) if fmt.is_derivable else encoded(fmt, x.t(), 1 - dim, plane="col", **seed)
        for side, output, want in zip(("row", "col"), result, (row, col), strict=True):
            yield from ((f"shard {name} {side} {part} {dim=}", output[part], want[part]) for part in want)


def poisoned() -> Check:
    """Planes whose NaN, and in turn an infinity, reach products, by what they decode to. Some words have none.

    One tile: `planes` has the edges between tiles.
    """
    x = awkward()[:48, :48].bfloat16()
    x[20:40] = torch.randn(20, 48)
    for at, name in enumerate(name for name in NAMES if name not in SAME_BUT_448):
        fmt, x[9, 7] = formats.get(name), torch.inf if at % 2 else 1.0
        result = casts._two_level_cast(fmt, fmt, fmt.is_derivable)(x, seed=torch.tensor([SEED]))
        for side, output, matrix in zip(("row", "col"), result, (x, x.t()), strict=True):
            want = fmt.encode(matrix, seed=SEED, plane=side, propagate=True)
            if side == "col" and fmt.is_derivable:
                want = fmt.derive(fmt.encode(x, seed=SEED, propagate=True), x.shape[1])
            finite = [torch.where(t.isfinite(), t, torch.nan) for t in (decoded(fmt, output), decoded(fmt, want))]
            yield f"poisoned {name} {side}", *finite
            yield f"poisoned {name} {side} amax", output["amax"], want["amax"]


def decoded(fmt: Format, parts: dict[str, Tensor]) -> Tensor:
    return fmt.decode(parts, torch.float32)


def values(everything: bool) -> Check:
    shapes = (70, 150), (35, 141), (1, 7)
    for (i, name), dtype in itertools.product(enumerate(("nvfp4", "nvfp4_row", "nvfp4_16x16_4over6")), DTYPES):
        fmt = formats.get(name)
        for rows, cols in shapes if everything else [shapes[(i + DTYPES.index(dtype)) % 3]]:
            parts = fmt.encode(awkward()[:rows, :cols])
            arguments = parts["codes"], parts["scale"].t().contiguous().t()
            top = fmt.scale_limits(dtype)[0]
            result = decode_nvfp4.decode(*arguments, parts["amax"], top, dtype)
            yield f"values {name} {rows} {dtype}", result, fmt.decode(parts, dtype)
            if dtype is torch.bfloat16:
                result = decode_nvfp4.decode(*arguments, None, top, dtype)
                yield f"inner {name} {rows}", result, fmt.factors(parts).values


def epilogues(everything: bool) -> Check:
    y = awkward()
    m, n = y.shape
    extents = None, 1, "lines"
    ways = list(itertools.product((1.0, 2688.0), (False, True)))
    for i, (a, b, dtype) in enumerate(itertools.product(extents, extents, DTYPES)):
        for constant, bias in ways if everything else [ways[(i + i // 3) % 4]]:
            sides = [
                Factors(y, None if of is None else torch.rand(size if of == "lines" else 1), divisor)
                for of, size, divisor in ((a, m, constant), (b, n, 1.5))
            ]
            add = torch.randn(n).to(dtype) if bias else None
            one_over = 1.0 / (sides[0].divisor * sides[1].divisor)
            arguments, what = (
                (y, sides[0].epilogue_scale, sides[1].epilogue_scale, one_over, add),
                f"epilogue {a} {b} {constant} {bias} {dtype}",
            )
            want = finish(scaled(y, *sides), torch.float32, add)
            yield what, epilogue.finish(*arguments, torch.empty_like(y, dtype=dtype)), want.to(dtype)
            before = torch.randn(m, n).to(dtype)
            yield f"{what} adding", epilogue.finish(*arguments, before.clone(), True), (want + before.float()).to(dtype)
    sides = [Factors(y, torch.rand(m) * 1e36, 1.0), Factors(y, torch.rand(n) * 1e-38, 1.0)]  # rows alone overflow
    result = epilogue.finish(y, sides[0].epilogue_scale, sides[1].epilogue_scale, 1.0, None, torch.empty_like(y))
    yield "epilogue of huge rows and tiny columns", result, scaled(y, *sides)


def checks(everything: bool) -> Check:
    return itertools.chain(planes(everything), shards(), poisoned(), values(everything), epilogues(everything))
