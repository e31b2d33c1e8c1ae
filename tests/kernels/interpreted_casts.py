"""Checks: the cast of both planes, and copies, against the plain stages."""

import itertools
from collections.abc import Iterator

import torch
from interpreting import Check, awkward, encoded, twice
from torch import Tensor

from duotone import formats
from duotone.dispatch.casts import _new_cast
from duotone.formats import Format
from duotone.kernels import rows
from duotone.kernels.cast import Cast

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
HOW = [(torch.bfloat16, True, None), (torch.float32, False, 1), (torch.float16, True, 0)]
"""The dtype of a matrix, whether what is not finite propagates, the dimension that is sharded."""


def twins(row: Format, col: Format, x: Tensor, propagate: bool, dim: int | None) -> Iterator[dict[str, Tensor]]:
    """The parts of both planes by the plain stages; `dim` is the sharded one."""
    yield encoded(row, x, dim, propagate=propagate)
    if col.is_derivable:
        parts = col.derive(encoded(col, x, dim, propagate=propagate), x.shape[1])
        assert parts is not None
        yield parts
    else:
        yield encoded(col, x.t(), None if dim is None else 1 - dim, propagate=propagate, plane="col")


def casts(everything: bool) -> Check:
    """Even and odd sizes, one row, one column; infinities and NaN that propagate and that do not; shards.

    Ways take turns, so that each pair of formats meets each. With `everything` both sizes meet all of them.
    """
    x = awkward()
    shapes = {"even": x[:64, :128], "odd": x[1:, :143], "row": x[7:8], "column": x[:, :1]}
    for (i, pair), (at, (name, part)) in itertools.product(enumerate(PAIRS), enumerate(shapes.items())):
        row, col = (formats.get(one) for one in pair)
        ways = HOW if name in ("even", "odd") and everything else [HOW[(i + at) % len(HOW)]]
        for dtype, propagate, dim in ways:
            matrix = part.to(dtype).contiguous()
            cast = _new_cast(row, col, dtype, propagate)
            assert isinstance(cast, Cast)
            planes = cast(matrix) if dim is None else cast(matrix, amaxes=twice(*cast.measure(matrix, dim)))
            for side, result, want in zip(("row", "col"), planes, twins(row, col, matrix, propagate, dim), strict=True):
                assert result is not None and list(result) == list(want)
                label = f"{pair} {side} {name} {dtype} {propagate=} {dim=}"
                yield from ((f"{label} {part}", result[part], want[part]) for part in want)


def copies() -> Check:
    codes = torch.randint(0, 256, (70, 150), dtype=torch.uint8)
    yield "copy turned", rows.contiguous_rows(codes.t()), codes.t().contiguous()
    yield "copy gaps", rows.contiguous_rows(codes[::2, ::3]), codes[::2, ::3].contiguous()


def rewrites() -> Check:
    """A cast over planes, unless the flag is set; over parts that lie in another way nothing happens."""
    x = awkward()[1:65, :143].bfloat16().contiguous()
    for pair in PAIRS[:5]:
        row, col = (formats.get(one) for one in pair)
        cast = _new_cast(row, col, x.dtype, True)
        before, want = cast(torch.randn(64, 143).bfloat16()), cast(x)
        old = [part.clone() for plane in before for part in plane.values()]
        for noop, after in ((1, old), (0, [part for plane in want for part in plane.values()])):
            codes = before[0]["codes"]
            typed = {**before[0], "codes": codes if row.code_dtype is None else codes.view(row.code_dtype)}
            is_cast = cast.over(x, (typed, before[1]), torch.tensor([noop], dtype=torch.int32))
            yield f"{pair} {noop=} is taken", bool(is_cast)
            parts = [part for plane in before for part in plane.values()]
            for number, (result, part) in enumerate(zip(parts, after, strict=True)):
                yield f"{pair} {noop=} part {number}", result, part
        turned = {**before[0], "codes": before[0]["codes"].t().contiguous().t()}
        yield f"{pair} other strides", not cast.over(x, (turned, before[1]), torch.zeros(1, dtype=torch.int32))


def checks(everything: bool) -> Check:
    yield from casts(everything)
    yield from rewrites()
    yield from copies()
