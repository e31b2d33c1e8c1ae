"""What cuBLAS's FP8 products lose while they add up, against exact products of the same operands, and their times.

    PYTHONPATH=src python -m bench.accumulation > bench/results/DATE-accumulation.jsonl

A record of errors for each distribution, K and kind of scales: the norm of the error over that of the exact product,
and the mean of (result - exact) / exact where all terms are positive. A record of times for each shape and kind of
scales. Results are bf16. Needs a GPU of compute capability 9.0.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.timing.duel import CudaClock, Pace, alone
from bench.timing.records import emit
from duotone import formats
from duotone.dispatch.rule import GemmRule
from duotone.dispatch.scaled import BlockScaledProduct, ScaledProduct
from duotone.tensor.plane_encoder import encode_plane

TENSOR, ROW, BLOCK, SQUARE = "fp8_e4m3_tensor", "fp8_e4m3_row", "fp8_e4m3_1x128", "fp8_e4m3_128x128"
SLOW, FAST = (ScaledProduct("", fast) for fast in (False, True))
LENGTHS = (1024, 4096, 16384, 65536)
SIDE = 512
SHAPES = ((8192, 4096, 4096), (8192, 4096, 14336), (16384, 8192, 8192), (8192, 8192, 28672))
PRODUCTS: dict[str, tuple[GemmRule, str, str]] = {
    "tensor, slow": (SLOW, TENSOR, TENSOR),
    "tensor, fast": (FAST, TENSOR, TENSOR),
    "row, slow": (SLOW, ROW, ROW),
    "row, fast": (FAST, ROW, ROW),
    "1x128 x 128x128": (BlockScaledProduct(), BLOCK, SQUARE),
    "1x128 x 1x128": (BlockScaledProduct(), BLOCK, BLOCK),
}
PACE = Pace(5, 0.05)
WAYS = ("tensor, fast", "tensor, slow", "1x128 x 128x128")
"""The products whose errors are taken."""


def operand(rows: int, k: int, positive: bool) -> Tensor:
    return (torch.rand if positive else torch.randn)(rows, k, device="cuda").to(torch.bfloat16)


def errors() -> Iterator[dict[str, Any]]:
    for positive, k in itertools.product((False, True), LENGTHS):
        x, w = operand(SIDE, k, positive), operand(SIDE, k, positive)
        for kind in WAYS:
            rule, of_x, of_w = PRODUCTS[kind]
            a, b = encode_plane(formats.get(of_x), x), encode_plane(formats.get(of_w), w)
            exact = a.dequantize(torch.float32).double() @ b.dequantize(torch.float32).double().t()
            lost = rule.run(a, b, torch.bfloat16).double() - exact
            record = {"error": (lost.norm() / exact.norm()).item()}
            if positive:
                record["bias"] = (lost / exact).mean().item()
            yield {"values": "positive" if positive else "normal", "k": k, "kind": kind, **record}


def times() -> Iterator[dict[str, Any]]:
    for m, k, n in SHAPES:
        x, w = operand(m, k, False), operand(n, k, False)
        for kind, (rule, of_x, of_w) in PRODUCTS.items():
            a, b = encode_plane(formats.get(of_x), x), encode_plane(formats.get(of_w), w)
            ms = alone(lambda rule=rule, a=a, b=b: rule.run(a, b, torch.bfloat16), CudaClock(), PACE)
            yield {"shape": f"{m}x{k}x{n}", "kind": kind, "ms": ms, "tflops": 2 * m * k * n / ms / 1e9}


def main() -> None:
    for record in itertools.chain(errors(), times()):
        emit("cuda", record)


if __name__ == "__main__":
    main()
