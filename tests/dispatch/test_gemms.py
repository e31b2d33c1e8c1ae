"""Each GEMM rule against a float64 product of decoded operands, and the table that chooses among them."""

import itertools

import pytest
import torch

from duotone import formats
from duotone.dispatch.gemms import RULES, GemmProblem, choose
from duotone.dispatch.products import factors, mm_fp32
from duotone.dispatch.target import target
from duotone.formats import Epilogue
from duotone.tensor import Plane
from duotone.tensor.plane_encoder import encode_plane

M, N, K = 48, 80, 160
PAIRS = [
    ("fp8_e4m3_tensor", "fp8_e4m3_tensor", "decode, fp32 product and epilogue"),
    ("fp8_e5m2_tensor", "fp8_e4m3_tensor_pow2", "decode, fp32 product and epilogue"),
    ("fp8_e4m3_row", "fp8_e4m3_row", "decode, fp32 product and epilogue"),
    ("fp8_e4m3_row", "fp8_e4m3_tensor", "decode, fp32 product and epilogue"),
    ("mxfp8_e4m3", "mxfp8_e5m2", "decode, bf16 product"),
    ("fp8_e4m3_1x128", "fp8_e4m3_128x128", "decode, bf16 product"),
    ("fp8_e4m3_1x128_fp32", "fp8_e4m3_128x128_fp32", "decode, fp32 product per block"),
    ("fp8_e4m3_128x128_fp32", "fp8_e4m3_1x128_fp32", "decode, fp32 product per block"),
    ("fp8_e4m3_1x128_fp32", "fp8_e4m3_1x128_fp32", "decode, fp32 product per block"),
    ("fp8_e4m3_1x128_fp32", "mxfp8_e4m3", "decode, fp32 product per block"),
    ("fp8_e4m3_1x128_fp32", "nvfp4", "decode, fp32 product per block"),
    ("nvfp4", "nvfp4_16x16", "decode, fp32 product and epilogue"),
    ("nvfp4_rht", "nvfp4_rht", "decode, fp32 product and epilogue"),
    ("nvfp4_row", "nvfp4", "decode, fp32 product and epilogue"),
    ("nvfp4_row", "nvfp4_row", "decode, fp32 product and epilogue"),
    ("nvfp4_4over6", "nvfp4_4over6_448", "decode, fp32 product and epilogue"),
    ("nvfp4", "mxfp8_e4m3", "decode, fp32 product and epilogue"),
    ("nvfp4", "fp8_e4m3_row", "decode, fp32 product and epilogue"),
    ("mxfp4", "mxfp6_e2m3", "decode, bf16 product"),
    ("nvfp4_rht", "mxfp8_e4m3", "decode and unrotate, fp32 product"),
    ("mxfp8_e4m3", "identity", "decode, high-precision product"),
    ("identity", "identity", "torch"),
]


def planes(a: str, b: str, cols: int = K) -> tuple[Plane, Plane]:
    x, w = torch.randn(M, cols, dtype=torch.bfloat16), torch.randn(N, cols, dtype=torch.bfloat16)
    return encode_plane(formats.get(a), x), encode_plane(formats.get(b), w)


def reference(a: Plane, b: Plane) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact product of the operands as float64, and the same with magnitudes, which bounds every partial sum."""

    def full(p: Plane) -> torch.Tensor:
        if p.format.epilogue is Epilogue.HIGH_PRECISION:
            return p.parts["codes"].double()
        f = factors(p)
        if f.epilogue_scale is None:
            return f.values.double()
        outer = f.epilogue_scale.double().reshape(f.epilogue_scale.shape[0], -1)
        if p.format.epilogue is Epilogue.BLOCK:
            block = p.format.block
            outer = outer.repeat_interleave(block.rows, 0)[: p.shape[0]].repeat_interleave(block.cols, 1)[
                :, : p.shape[1]
            ]
        return f.values.double() * outer / f.divisor

    left, right = full(a), full(b)
    if a.format.transform != b.format.transform:
        left, right = a.dequantize(torch.float32).double(), b.dequantize(torch.float32).double()
    left, right = left[:, : right.shape[1]], right[:, : left.shape[1]]
    return left @ right.t(), left.abs() @ right.abs().t()


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("a", "b", "kernel"), PAIRS)
def test_the_chosen_rule_computes_the_product_of_the_decoded_operands(a, b, kernel, out_dtype) -> None:
    left, right = planes(a, b)
    rule, reason = choose(GemmProblem(left.format, right.format, target("cpu"), out_dtype))
    if out_dtype == torch.bfloat16:
        assert rule.name == kernel
    assert rule.native == (kernel == "torch")
    assert bool(reason) != rule.native
    for bias in (None, torch.randn(N, dtype=torch.bfloat16)):
        exact, magnitude = reference(left, right)
        exact = exact if bias is None else exact + bias.double()
        y = rule.run(left, right, out_dtype, bias)
        assert y.dtype == out_dtype
        # fp32 sums: at most K roundings of partial sums, three of scales; then one rounding to the result's dtype.
        high = bias is not None and ("torch" in kernel or "high" in kernel)  # then torch rounds to the operands' dtype
        rounded = 2.0**-8 if out_dtype == torch.bfloat16 or high else 2.0**-24
        bound = (K + 4) * 2.0**-24 * (magnitude + 4) + rounded * exact.abs() + 1e-30
        assert ((y.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("a", "b", "kernel"), PAIRS)
def test_a_product_is_written_over_or_added_to_what_is_there(a, b, kernel, dtype) -> None:
    """As a plan for bf16 has it: no rounding to bf16 on the way to a wider `main_grad`, whose memory may be strided."""
    left, right = planes(a, b)
    rule, _ = choose(GemmProblem(left.format, right.format, target("cpu"), torch.bfloat16))
    exact, magnitude = reference(left, right)
    out = torch.full((M, 2 * N), torch.nan, dtype=dtype)[:, ::2]
    rule.run_into(left, right, out, False)
    half_ulp = max(torch.finfo(dtype).eps / 2, 2.0**-24)
    sums = (K + 4) * 2.0**-24 * (magnitude + 4)
    assert ((out.double() - exact).abs() <= sums + half_ulp * exact.abs() + 1e-7).all()  # fp16's subnormals
    before = torch.randn(M, N).to(dtype)
    total = before.clone()
    rule.run_into(left, right, total, True)
    want, size = before.double() + exact, before.double().abs() + exact.abs()
    assert ((total.double() - want).abs() <= sums + 2 * half_ulp * size + 1e-7).all()  # of the product, of the sum


FACTORS_OF_BOTH = [
    ("fp8_e4m3_row", "fp8_e4m3_row"),
    ("fp8_e5m2_row", "fp8_e4m3_row"),
    ("nvfp4_row", "nvfp4_row"),
    ("fp8_e4m3_1x128_fp32", "fp8_e4m3_128x128_fp32"),
    ("fp8_e4m3_128x128_fp32", "fp8_e4m3_1x128_fp32"),
    ("fp8_e4m3_1x128_fp32", "fp8_e4m3_1x128_fp32"),
]
"""Pairs whose product is multiplied by a factor of each operand, one after the other."""


@pytest.mark.parametrize("sizes", [(1e37, 1e-37), (1e-37, 1e37), (1e37, 1e9)], ids=str)
@pytest.mark.parametrize(("a", "b"), FACTORS_OF_BOTH)
def test_a_huge_operand_and_a_tiny_one_multiply_to_what_they_stand_for(a, b, sizes) -> None:
    """Infinite where the true value is, and 0 for rows of zeros, in all dtypes, with a bias and added to memory."""
    x, w = torch.randn(M, K).clamp(-2, 2), torch.randn(N, K).clamp(-2, 2)
    x[5], w[7] = 0, 0
    left, right = encode_plane(formats.get(a), x * sizes[0]), encode_plane(formats.get(b), w * sizes[1])
    exact, magnitude = reference(left, right)
    for dtype, bias in itertools.product((torch.float32, torch.bfloat16, torch.float16), (None, torch.randn(N))):
        rule, _ = choose(GemmProblem(left.format, right.format, target("cpu"), dtype))
        want = exact if bias is None else exact + bias.double()
        added = torch.ones(M, N, dtype=dtype)
        y = rule.run(left, right, dtype, bias)
        rule.run_into(left, right, added, True)
        assert ((y == 0) | (want != 0)).all()
        bound = (K + 4) * 2.0**-23 * (magnitude + 4) + torch.finfo(dtype).eps * (want.abs() + 2)
        for got, true in ((y, want), (added, exact + 1)):
            holds = true.abs() < torch.finfo(dtype).max
            assert not got.isnan().any()
            assert ((got.double() - true).abs() <= bound)[holds].all() and not got[~holds].isfinite().any()


@pytest.mark.parametrize(("a", "b"), FACTORS_OF_BOTH)
def test_the_order_of_factors_keeps_its_bits_where_it_gives_finite_values(a, b) -> None:
    x, w = torch.randn(M, 128).abs().clamp(max=3), torch.randn(N, 128).abs().clamp(max=3)
    for operand in (x, w):
        operand[:8] *= 1e38
        operand[8:16] *= 1e-38
    left, right = encode_plane(formats.get(a), x), encode_plane(formats.get(b), w)
    rule, _ = choose(GemmProblem(left.format, right.format, target("cpu"), torch.float32))
    one, other = factors(left), factors(right)
    rows, cols = (
        f.epilogue_scale.reshape(f.epilogue_scale.shape[0], 1).repeat_interleave(max(plane.format.block.rows, 1), 0)[:n]
        for f, plane, n in ((one, left, M), (other, right, N))
    )
    first, second = (cols.t(), rows) if left.format.block.rows > right.format.block.rows else (rows, cols.t())
    y = mm_fp32(one.values, other.values)
    if one.divisor * other.divisor != 1.0:
        y = y * torch.tensor(1.0 / (one.divisor * other.divisor))
    as_before = (y * first) * second
    finite = (y * first).isfinite()
    assert not finite.all() and torch.equal(rule.run(left, right, torch.float32)[finite], as_before[finite])


def test_every_pair_of_formats_has_a_rule() -> None:
    for a, b in itertools.product(formats.names(), repeat=2):
        for dtype in (torch.bfloat16, torch.float32):
            rule, _ = choose(GemmProblem(formats.get(a), formats.get(b), target("cpu"), dtype))
            assert rule in RULES


@pytest.mark.parametrize(("a", "b"), [("nvfp4", "mxfp8_e4m3"), ("nvfp4_rht", "nvfp4_rht"), ("mxfp4", "mxfp4")])
@pytest.mark.parametrize("cols", [1, 15, 33])
def test_ragged_and_odd_contractions_multiply(a: str, b: str, cols: int) -> None:
    left, right = planes(a, b, cols)
    rule, _ = choose(GemmProblem(left.format, right.format, target("cpu"), torch.float32))
    exact, magnitude = reference(left, right)
    assert ((rule.run(left, right, torch.float32).double() - exact).abs() <= 64 * 2.0**-24 * magnitude + 1e-30).all()


def test_mm_fp32_keeps_fp32_sums_and_no_other_thread_sees_another_setting(monkeypatch) -> None:
    a, b = torch.randn(64, 512).bfloat16(), torch.randn(32, 512).bfloat16()
    before, plain, during = torch.backends.mkldnn.matmul.fp32_precision, torch.mm, []

    def watched(*operands: torch.Tensor) -> torch.Tensor:
        during.append(torch.backends.mkldnn.matmul.fp32_precision)
        return plain(*operands)

    monkeypatch.setattr(torch, "mm", watched)
    y = mm_fp32(a, b)
    assert during == [before]
    exact = a.double() @ b.double().t()
    assert y.dtype == torch.float32
    assert ((y - exact).abs() <= 512 * 2.0**-24 * (a.double().abs() @ b.double().abs().t())).all()
    assert mm_fp32(a.to("meta"), b.to("meta")).shape == (64, 32)


def test_nvfp4_alpha_is_applied_once_in_fp32() -> None:
    a, b = planes("nvfp4", "nvfp4")
    fa, fb = factors(a), factors(b)
    alpha = (fa.epilogue_scale * fb.epilogue_scale) * torch.tensor(1.0 / (2688.0 * 2688.0))
    rule, _ = choose(GemmProblem(a.format, b.format, target("cpu"), torch.float32))
    assert torch.equal(rule.run(a, b, torch.float32), mm_fp32(fa.values, fb.values) * alpha)
