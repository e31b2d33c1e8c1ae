"""What adding a weight gradient to fp32 main_grad costs: in the product, and behind it.

    PYTHONPATH=src python -m bench.main_grad > bench/results/DATE-main-grad.jsonl

A record a shape and kind of scales: milliseconds of the product alone in fp32, of the product and an add behind it, and
of the product that adds. Solo, on a device that does nothing else. Needs a GPU of compute capability 9.0.
"""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bench.timing.duel import CudaClock, Pace, alone
from bench.timing.records import emit
from duotone import formats
from duotone.dispatch import gemms, segments
from duotone.dispatch.rule import GemmProblem
from duotone.dispatch.target import target
from duotone.kernels.grouped import GroupedProduct
from duotone.tensor.plane_encoder import encode_plane

SHAPES = ((4096, 8192, 4096), (14336, 8192, 4096), (8192, 16384, 8192), (28672, 8192, 8192))
"""Rows of dw, tokens, columns of dw."""
KINDS = {
    "tensor": ("fp8_e5m2_tensor", "fp8_e4m3_tensor"),
    "row": ("fp8_e4m3_row", "fp8_e4m3_row"),
    "1x128": ("fp8_e4m3_1x128", "fp8_e4m3_1x128"),
    "1x128, 128x128": ("fp8_e4m3_1x128", "fp8_e4m3_128x128"),
    "mxfp8": ("mxfp8_e4m3", "mxfp8_e4m3"),
    "bf16": ("identity", "identity"),
}
EXPERTS = (1024, 3072, 2048, 1536, 2560, 1792, 2304, 2048)
MATRICES = ((2048, 2048), (4096, 4096), (14336, 4096))
PACE = Pace(5, 0.02)
Times = dict[str, float]


def linear(shape: tuple[int, int, int], kind: str) -> Times:
    """The weight gradient of a linear."""
    n, tokens, k = shape
    a, b = (
        encode_plane(formats.get(name), torch.randn(rows, tokens, device="cuda").bfloat16())
        for name, rows in zip(KINDS[kind], (n, k), strict=True)
    )
    rule, _ = gemms.choose(GemmProblem(a.format, b.format, target("cuda"), torch.bfloat16))
    main = torch.zeros(n, k, device="cuda")
    return {
        "product": _rounded(lambda: rule.run(a, b, torch.float32)),
        "then_added": _rounded(lambda: main.add_(rule.run(a, b, torch.float32))),
        "adding": _rounded(lambda: rule.run_into(a, b, main, True)),
    }


def grouped(shape: tuple[int, int], lines: bool, fast: bool) -> Times:
    """The weight gradients of experts, in one launch."""
    n, k = shape
    a, b = (torch.randn(rows, sum(EXPERTS), device="cuda").to(torch.float8_e4m3fn) for rows in shape)
    scales = [torch.ones(len(EXPERTS), rows if lines else 4, device="cuda") for rows in shape]
    of_a, of_b = scales if lines else [scale[:, :1] for scale in scales]
    mains = [torch.zeros(n, k, device="cuda") for _ in EXPERTS]
    product, where = GroupedProduct(fast, lines), segments.segments_of(EXPERTS, a, grouped=True)
    operands, places = (a, b, (of_a, of_b), where), segments.table(mains)

    def apart() -> Tensor:
        gradients = product.of_columns(*operands, torch.float32)
        for main, one in zip(mains, gradients.unbind(0), strict=True):
            main.add_(one)
        return gradients

    return {
        "product": _rounded(lambda: product.of_columns(*operands, torch.float32)),
        "then_added": _rounded(apart),
        "adding": _rounded(lambda: product.of_columns_into(*operands, mains[0], places, True)),
    }


def _rounded(call: Callable[[], object]) -> float:
    return round(alone(call, CudaClock(), PACE), 4)


def records() -> Iterator[tuple[str, str, Times]]:
    for shape, kind in itertools.product(SHAPES, KINDS):
        yield "x".join(map(str, shape)), kind, linear(shape, kind)
    for shape, lines, fast in itertools.product(MATRICES, (False, True), (False, True)):
        kind = f"8 experts, {'row' if lines else 'tensor'}{', fast' * fast}"
        yield "x".join(map(str, shape)), kind, grouped(shape, lines, fast)


def main() -> None:
    for shape, kind, times in records():
        emit("cuda", {"shape": shape, "kind": kind, **times})


if __name__ == "__main__":
    main()
