"""Every kernel compiles for the architectures that it is meant for, without a GPU, and spills nothing."""

import inspect

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed; it is where CUDA is")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from duotone.kernels import blocks  # noqa: E402

SHAPES = {"stride_m": "i32", "stride_k": "i32", "M": "i32", "K": "i32"}
TILE = {"TM": 64, "TK": 128}
WIDE = {(True, True): (1 << 30, 1 << 30), (False, True): (1, 1 << 30), (False, False): (1, 32)}
CASES = [
    *[
        (blocks.block_amax_kernel, {"x": x, "out": "*fp32", "GC": "i32"}, {"R": r, "C": c, "TM": tm, "TK": 128})
        for x in ("*bf16", "*fp32")
        for r, c, tm in ((1, 16, 32), (1, 32, 32), (1, 128, 32), (16, 16, 32), (128, 128, 128))
    ],
    (blocks.row_amax_kernel, {"x": "*bf16", "out": "*i32"}, TILE),
    (blocks.tensor_amax_kernel, {"x": "*bf16", "out": "*i32"}, TILE),
    *[
        (
            blocks.fp32_scale_kernel,
            {"amax": "*fp32", "scale": "*fp32", "stored": "*fp32", "N": "i32"}
            | dict.fromkeys(("largest", "overflow", "epsilon"), "fp32"),
            {"POWER": power, "T": 1024},
        )
        for power in (False, True)
    ],
    (
        blocks.exponent_scale_kernel,
        {"amax": "*fp32", "code": "*u8", "multiplier": "*fp32", "N": "i32", "reciprocal": "fp32"},
        {"T": 1024},
    ),
    (blocks.rows_kernel, {"x": "*u8", "out": "*u8"}, TILE),
]
for (wide_r, wide_c), (r, c) in WIDE.items():
    extents = {"R": r, "C": c, "WIDE_R": wide_r, "WIDE_C": wide_c, **TILE}
    for codes in ("*fp8e4nv", "*fp8e5"):
        cast = {"x": "*bf16", "multiplier": "*fp32", "out": codes, "GC": "i32", "largest": "fp32"}
        CASES.append((blocks.cast_kernel, cast, extents))
        values = {"codes": codes, "factor": "*fp32", "out": "*bf16", "GC": "i32"}
        CASES.append((blocks.values_kernel, values, extents))


@pytest.mark.parametrize("capability", [90, 100, 120])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_kernel_compiles_and_spills_nothing(case, capability) -> None:
    kernel, arguments, constants = CASES[case]
    names = list(inspect.signature(kernel.fn).parameters)
    types = {**SHAPES, **arguments}
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs={(names.index(n),): v for n, v in constants.items()})
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert "ld.local" not in made.asm["ptx"] and "st.local" not in made.asm["ptx"]
    assert made.metadata.shared <= 64 * 1024
