"""Which tiles and warps a kernel is fastest with: each choice, its bits against those of the present one, its time.

    PYTHONPATH=src python -m bench.tune [--shape 16384x8192] [--only line_amax] > results/tuning.jsonl

The winners are constants beside the kernels: `LINES, ACROSS, SPANS, WARPS` in kernels/amax.py, the tiles in
kernels/cast.py, `TILE` in kernels/nvfp4.py and `TILES` in kernels/grouped.py. Needs a CUDA device that converts to FP8.
"""

import argparse
import copy
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.timing.duel import CudaClock, Pace, alone
from bench.timing.records import emit
from duotone import formats
from duotone.dispatch import segments
from duotone.dispatch.casts import one_read
from duotone.kernels import activations as made_of
from duotone.kernels import amax, cast, grouped, nvfp4

ON_THE_WAY = ("fp8_e4m3_delayed", "fp8_e4m3_1x128", "mxfp8_e4m3")
CASTS = ("fp8_e4m3_tensor", "fp8_e4m3_row", "fp8_e4m3_1x128", "fp8_e4m3_128x128", "mxfp8_e4m3")
TILES = tuple(itertools.product((32, 64, 128), (32, 64, 128, 256), (1, 2, 4, 8)))
NVFP4 = (("nvfp4", "nvfp4_rht"), ("nvfp4_sr", "nvfp4_rht_sr"), ("nvfp4_16x16", "nvfp4_16x16"))
WALKS = tuple(itertools.product((8, 16, 32, 64), (128, 256, 512), (256, 512, 1024), (2, 4, 8)))
ROWS = {True: (64, 128), False: (128,)}
"""By kind of accumulation: slow sums are of half as many rows, and Hopper's products of 64 at least."""
GROUPED = (128, 256), (4, 8), (3, 4), (4, 8, 16), (True, False)
SEGMENTS = 8

Choice = tuple[str, tuple[int, ...], Callable[[], list[Tensor]]]
"""What is tuned, the choice, and a call that gives what the kernel wrote."""


def line_amaxes(x: Tensor) -> Iterator[Choice]:
    """Rows and columns of a step, rows of a walk, and warps."""
    m, k = x.shape

    def call(rows: int, cols: int, span: int, warps: int) -> list[Tensor]:
        launch = amax.line_amax_kernel.bind({"TM": rows, "TK": cols, "SPAN": span, "NAN": False}, warps)
        bits = torch.zeros(m + k, dtype=torch.int32, device=x.device)
        launch(-(-m // span) * -(-k // cols), (x, bits, bits[m:]), (m, k))
        return [bits]

    present = amax.LINES, amax.ACROSS, amax.SPANS[0], amax.WARPS
    for choice in (present, *WALKS):
        yield "line_amax", choice, lambda choice=choice: call(*choice)


def casts(x: Tensor) -> Iterator[Choice]:
    """Rows and columns of a tile, and warps, of casts to both planes."""
    for name in CASTS:
        fmt = formats.get(name)
        kernel: Any = one_read(fmt, fmt, x, True)
        for choice in (kernel.tile, *TILES):
            other = _like(kernel)
            other.tile = choice
            yield name, choice, lambda other=other: _parts(other(x))


def activations(x: Tensor) -> Iterator[Choice]:
    """Tiles and warps of casts that make an activation or its gradient on the way."""
    dy, half = x[:, : x.shape[1] // 2].contiguous(), x.shape[1] // 2
    kinds = {
        "gelu": (cast.ACTIVATED, made_of.value("gelu", x, False)),
        "gelu gradient": (cast.ACTIVATED, made_of.gradient("gelu", x, x, False)),
        "swiglu": (cast.ACTIVATED, made_of.value("silu", x, True)),
        "swiglu gradient": (cast.GATED, made_of.gradient("silu", dy, x, True)),
    }
    scale = torch.ones(1, device=x.device)

    def call(kernel: Any, what: Any, table: dict[Any, Any], tile: tuple[int, ...]) -> list[Tensor]:
        with mock.patch.dict(table, {kernel.tile: tile}):
            return _parts(kernel.produced(what, (scale, scale)))

    for name, (kind, (table, what)) in itertools.product(ON_THE_WAY, kinds.items()):
        plain: Any = one_read(formats.get(name), formats.get(name), x, True)
        for choice in (table[plain.tile], *TILES):
            if half % choice[1] == 0:
                yield f"{kind} to {name}", choice, partial(call, _like(plain), what, table, choice)


def nvfp4_casts(x: Tensor) -> Iterator[Choice]:
    seed = torch.ones(1, dtype=torch.int64, device=x.device)
    for pair in NVFP4:
        kernel = one_read(formats.get(pair[0]), formats.get(pair[1]), x, True)

        def call(kernel: Any, tile: tuple[int, ...]) -> list[Tensor]:
            with mock.patch.object(nvfp4, "TILE", tile):
                return _parts(kernel(x, seed=seed))

        for choice in (nvfp4.TILE, *TILES):
            yield "/".join(pair), choice, partial(call, _like(kernel), choice)


def grouped_products(x: Tensor) -> Iterator[Choice]:
    """The tile of products of equal segments with square matrices of their own, by kind of accumulation."""
    (m, k), e4m3 = x.shape, torch.float8_e4m3fn
    codes, weights = x.to(e4m3), torch.randn(SEGMENTS, k, k, device=x.device).to(e4m3)
    segments_of_x = segments.segments_of([m // SEGMENTS] * SEGMENTS, x, grouped=True)
    one = torch.ones(SEGMENTS, 4, device=x.device)[:, :1]
    for fast, rows in ROWS.items():
        for choice in (grouped.TILES[fast], *itertools.product(rows, *GROUPED)):
            product = grouped.GroupedProduct(fast, 0, tile=grouped.Tile(*choice[:4], walk=bool(choice[4])))
            of_rows = partial(product.of_rows, codes, weights, (one, one), segments_of_x, torch.bfloat16)
            yield f"grouped rows{', fast' * fast}", choice, lambda of_rows=of_rows: [of_rows()]


def _like(kernel: Any) -> Any:
    """The same cast, none of whose kernels is bound."""
    other = copy.copy(kernel)
    other._launches = {}
    return other


def _parts(planes: Any) -> list[Tensor]:
    return [part for plane in planes if plane is not None for part in plane.values()]


SUBJECTS = {
    "line_amax": line_amaxes,
    "casts": casts,
    "activations": activations,
    "nvfp4": nvfp4_casts,
    "grouped": grouped_products,
}


def tune(choices: Iterator[Choice], clock: Callable[[Callable[[], object]], float]) -> Iterator[dict[str, Any]]:
    """A record a choice, the present one first; the error where a kernel cannot take one."""
    references: dict[str, list[Tensor]] = {}
    for what, choice, call in choices:
        try:
            results = call()
        except Exception as error:  # Triton's own, of shapes, shared memory and registers
            yield {"what": what, "choice": choice, "error": str(error).splitlines()[0][:100]}
            continue
        same = all(torch.equal(a, b) for a, b in zip(references.setdefault(what, results), results, strict=True))
        yield {"what": what, "choice": choice, "ms": round(clock(call), 4), "same_bits": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="16384x8192")
    parser.add_argument("--only", choices=SUBJECTS)
    options = parser.parse_args()
    x = torch.randn(*map(int, options.shape.split("x")), device="cuda").bfloat16()
    clock, pace = CudaClock(), Pace(5, 0.01)
    for name in [options.only] if options.only else SUBJECTS:
        for record in tune(SUBJECTS[name](x), lambda call: alone(call, clock, pace)):
            emit("cuda", {"shape": options.shape, **record})


if __name__ == "__main__":
    main()
