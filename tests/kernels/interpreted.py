"""A script: the kernels of `duotone.kernels.blocks` in Triton's interpreter on the CPU, against their plain twins.

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

from duotone.formats import stages
from duotone.formats.elements import E4M3, E5M2
from duotone.formats.geometry import Block
from duotone.kernels import blocks

TORCH = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
BYTES = {1: np.uint8, 2: np.uint16, 4: np.uint32}
BLOCKS = [Block(*extents) for extents in ((0, 0), (1, 0), (1, 16), (1, 32), (1, 128), (16, 16), (128, 128))]
MAX = torch.finfo(torch.float32).max


def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Bits of one float type -> bits of another, to nearest even."""
    given = torch.from_numpy(np.ascontiguousarray(data).view(BYTES[data.itemsize])).view(TORCH[source])
    made = given.to(TORCH[target])
    return made.view(getattr(torch, f"uint{8 * made.itemsize}")).numpy()


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


def matrices() -> Iterator[tuple[str, Tensor]]:
    """Odd sizes, transposed and strided views, one row, one column."""
    x = awkward()
    yield "fp16 whole", x.half()
    for dtype in (torch.float32, torch.bfloat16):
        y = x.to(dtype)
        views = {"whole": y, "turned": y.t(), "odd": y[1:, :143], "gaps": y[::2, ::3], "row": y[7:8], "col": y[:, :1]}
        yield from ((f"{dtype} {name}", view) for name, view in views.items())


def bits(t: Tensor) -> Tensor:
    """Bits, with all NaNs of one dtype made one."""
    if t.is_floating_point():
        t = torch.where(t.float().isnan(), torch.nan, t.float()).view(torch.int32)
    return t.contiguous()


Check = Iterator[tuple[str, Tensor, Tensor]]
"""What was compared, the kernel's result, its twin's."""


def amaxes() -> Check:
    for (name, x), block in itertools.product(matrices(), BLOCKS):
        yield (
            f"amax {block.name} {name}",
            blocks.block_amax(x, block.rows, block.cols),
            stages.block_amax(block.view(x)),
        )


def casts() -> Check:
    """Codes of every matrix, by multipliers that its scale would be, and their values."""
    for (name, x), block, element in itertools.product(matrices(), BLOCKS, (E4M3, E5M2)):
        amax = stages.block_amax(block.view(x))
        multiplier, factor = stages.fp32_scale(amax, element.max, MAX, 0.0, False)
        extents = block.rows, block.cols
        codes = blocks.block_cast(x, multiplier, *extents, element.max, element.dtype)
        want = stages.cast(block.view(x), multiplier[:, None, :, None], element)
        want = block.unview(want.view(torch.uint8), *x.shape).contiguous()
        yield f"cast {element.name} {block.name} {name}", codes.view(torch.uint8), want

        given = want if x.is_contiguous() else want.t().contiguous().t()
        values = stages.values(block.view(want).view(element.dtype), factor[:, None, :, None], element, x.dtype)
        got = blocks.block_values(given.view(element.dtype), factor, *extents, x.dtype)
        yield f"values {element.name} {block.name} {name}", got, block.unview(values, *x.shape)


def scales() -> Check:
    subnormal = [0.0, 1e-45, 1e-40, 1.2e-38, E4M3.max * 2.0**-127, E5M2.max * 2.0**-127, E5M2.max * 2.0**-128]
    edges = [*subnormal, 0.5, 1.0, 447.9, 448.0, 449.0, 1e30, MAX, float("inf"), float("nan")]
    amax = torch.cat([torch.tensor(edges), torch.rand(1100).exp2() * torch.logspace(-38, 38, 1100)])[None]
    for element, epsilon, power in itertools.product((E4M3, E5M2), (0.0, 1e-12), (False, True)):
        given = amax, element.max, MAX, epsilon, power
        for part, got, want in zip(
            ("scale", "stored"), blocks.fp32_scale(*given), stages.fp32_scale(*given), strict=True
        ):
            yield f"fp32 {part} {element.name} {epsilon} {power}", got, want
    for element in (E4M3, E5M2):
        given = amax, element.reciprocal
        made, wanted = blocks.exponent_scale(*given), stages.exponent_scale(*given)
        for part, got, want in zip(("code", "multiplier"), made, wanted, strict=True):
            yield f"exponent {part} {element.name}", got, want


def copies() -> Check:
    codes = torch.randint(0, 256, (70, 150), dtype=torch.uint8)
    yield "copy turned", blocks.contiguous_rows(codes.t()), codes.t().contiguous()
    yield "copy gaps", blocks.contiguous_rows(codes[::2, ::3]), codes[::2, ::3].contiguous()


def main() -> int:
    torch.manual_seed(1234)
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    interpreter._convert_float = convert
    checks: tuple[Callable[[], Check], ...] = amaxes, casts, scales, copies
    made = wrong = 0
    for what, got, want in itertools.chain.from_iterable(check() for check in checks):
        made += 1
        if got.shape != want.shape or got.dtype != want.dtype or not torch.equal(bits(got), bits(want)):
            wrong += 1
            print(f"{what}: {int((bits(got) != bits(want)).sum()) if got.shape == want.shape else 'shape'} differ")
    print(f"{made} comparisons, {wrong} differ")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
