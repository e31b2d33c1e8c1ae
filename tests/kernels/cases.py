"""Which kernels are compiled ahead of time, and for which arguments: one line of `CASES` each.

A type is as in Triton's signatures: "*bf16", "i32", "fp32"; ":16" behind it says that the address or the number is
divisible by 16, as Triton sees most arguments at a launch.
"""

from dataclasses import dataclass
from typing import Any

from duotone.kernels import blocks


@dataclass(frozen=True)
class Case:
    """A kernel (a `triton.jit` function, or what holds one as `function`) and how it is compiled.

    Each parameter has a type, or is a constant. `name` is the test's id and the key in budgets.json.
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 3

    @property
    def function(self) -> Any:
        return getattr(self.kernel, "function", self.kernel)


MATRIX = {"stride_m": "i32", "stride_k": "i32", "M": "i32", "K": "i32"}
"""Any strides, any sizes."""

ROWS = {"stride_m": "i32:16", "M": "i32:16", "K": "i32:16"}
"""A contiguous matrix of round sizes; its `stride_k` is the constant 1."""

TILE = {"TM": blocks.ROWS, "TK": blocks.COLS}
WIDE = blocks.WHOLE

CODES = {"e4m3": "*fp8e4nv", "e5m2": "*fp8e5"}


def extents(rows: int, cols: int) -> dict[str, Any]:
    """Constants of a block of rows x cols, 0 for the whole extent."""
    return {"R": rows or WIDE, "C": cols or WIDE, "WIDE_R": rows == 0, "WIDE_C": cols == 0}


CASES = [
    *[
        Case(
            f"block_amax {r}x{c} {x}",
            blocks.block_amax_kernel,
            {"x": f"*{x}", "out": "*fp32", "GC": "i32"} | MATRIX,
            {"R": r, "C": c, "TM": max(r, 32), "TK": 128},
        )
        for x in ("bf16", "fp32")
        for r, c in ((1, 16), (1, 32), (1, 128), (16, 16), (128, 128))
    ],
    Case(
        "block_amax 1x32 bf16 contiguous",
        blocks.block_amax_kernel,
        {"x": "*bf16:16", "out": "*fp32:16", "GC": "i32:16"} | ROWS,
        {"stride_k": 1, "R": 1, "C": 32, "TM": 32, "TK": 128},
    ),
    Case("row_amax bf16", blocks.row_amax_kernel, {"x": "*bf16", "out": "*i32"} | MATRIX, TILE),
    Case("tensor_amax bf16", blocks.tensor_amax_kernel, {"x": "*bf16", "out": "*i32"} | MATRIX, TILE),
    *[
        Case(
            f"cast {shape} bf16 to {element}",
            blocks.cast_kernel,
            {"x": "*bf16", "multiplier": "*fp32", "out": codes, "GC": "i32", "largest": "fp32"} | MATRIX,
            extents(r, c) | TILE,
        )
        for element, codes in CODES.items()
        for shape, r, c in (("tensor", 0, 0), ("row", 1, 0), ("1x32", 1, 32))
    ],
    Case(
        "cast 1x32 bf16 to e4m3 contiguous",
        blocks.cast_kernel,
        {"x": "*bf16:16", "multiplier": "*fp32:16", "out": "*fp8e4nv:16", "GC": "i32:16", "largest": "fp32"} | ROWS,
        {"stride_k": 1} | extents(1, 32) | TILE,
    ),
    *[
        Case(
            f"values {shape} {element} to bf16",
            blocks.values_kernel,
            {"codes": codes, "factor": "*fp32", "out": "*bf16", "GC": "i32"} | MATRIX,
            extents(r, c) | TILE,
        )
        for element, codes in CODES.items()
        for shape, r, c in (("tensor", 0, 0), ("row", 1, 0), ("1x32", 1, 32))
    ],
    Case(
        "values 1x32 e4m3 to bf16 contiguous",
        blocks.values_kernel,
        {"codes": "*fp8e4nv:16", "factor": "*fp32:16", "out": "*bf16:16", "GC": "i32:16"} | ROWS,
        {"stride_k": 1} | extents(1, 32) | TILE,
    ),
    *[
        Case(
            f"fp32_scale {codec}",
            blocks.fp32_scale_kernel,
            {"amax": "*fp32", "scale": "*fp32", "stored": "*fp32", "N": "i32"}
            | dict.fromkeys(("largest", "overflow", "epsilon"), "fp32"),
            {"POWER": power, "T": 1024},
        )
        for codec, power in (("fp32", False), ("pow2", True))
    ],
    Case(
        "exponent_scale",
        blocks.exponent_scale_kernel,
        {"amax": "*fp32", "code": "*u8", "multiplier": "*fp32", "N": "i32", "reciprocal": "fp32"},
        {"T": 1024},
    ),
    Case("rows u8", blocks.rows_kernel, {"x": "*u8", "out": "*u8"} | MATRIX, {"TM": 64, "TK": 64}),
]
