"""Devices other than the measured one: plain stages below compute capability 8.9, products that torch has there."""

import warnings

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from duotone import formats
from duotone.dispatch import capability as capabilities
from duotone.dispatch import cublas, cuda, gemms, scaled, segment_products, stages
from duotone.formats.stages import PLAIN
from duotone.tensor import Plane

ROW, TENSOR, BLOCK, SQUARE = (f"fp8_e4m3_{kind}" for kind in ("row", "tensor", "1x128_fp32", "128x128_fp32"))


def on(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], old: bool = False) -> None:
    for module in (cublas, cuda, scaled):
        monkeypatch.setattr(module, "capability", lambda: capability)
    monkeypatch.setattr(cublas, "cublas_is_old", lambda: old)
    monkeypatch.setattr(cuda, "has_triton", lambda: True)


@pytest.mark.parametrize(("capability", "kernels"), [((7, 5), False), ((8, 0), False), ((8, 9), True), ((12, 0), True)])
def test_a_device_that_does_not_convert_to_fp8_gets_the_plain_stages(capability, kernels, monkeypatch) -> None:
    """Triton has no FP8 casts there: a kernel would fail to compile."""
    on(monkeypatch, capability)
    with FakeTensorMode():
        x = torch.empty(256, 256, device="cuda")
        assert stages.stages_for(x) is (cuda.CUDA if kernels else PLAIN)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("capability", "old", "any_dtype"),
    [((8, 9), False, False), ((9, 0), False, True), ((9, 0), True, False), ((10, 0), False, False)],
)
def test_scales_per_row_are_native_where_torch_gives_the_dtype(
    capability, old, any_dtype, dtype, fast, monkeypatch
) -> None:
    on(monkeypatch, capability, old)
    rule, reason = gemms.choose(gemms.GemmProblem(formats.get(ROW), formats.get(ROW), "cuda", dtype, fast))
    assert rule.native is (any_dtype or dtype is torch.bfloat16), reason
    rule, _ = gemms.choose(gemms.GemmProblem(formats.get(TENSOR), formats.get(TENSOR), "cuda", dtype, fast))
    assert rule.native


def test_products_of_blocks_want_the_cublas_that_has_them(monkeypatch) -> None:
    problem = gemms.GemmProblem(formats.get(BLOCK), formats.get(SQUARE), "cuda", torch.bfloat16)
    on(monkeypatch, (9, 0))
    assert gemms.choose(problem)[0].native
    on(monkeypatch, (9, 0), old=True)
    assert not gemms.choose(problem)[0].native
    assert "12.9" in scaled.BlockScaledProduct().reject(problem)


@pytest.mark.parametrize(
    ("built", "old"), [(None, False), ("12.6", True), ("12.8", True), ("12.9", False), ("13.0", False)]
)
def test_the_age_of_cublas_is_that_of_torchs_cuda(built, old, monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", built)
    assert capabilities.cublas_is_old.__wrapped__() is old


def cutlass(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias=None, out_dtype=None, out=None, **_) -> Tensor:
    """torch._scaled_mm as it is on devices other than Hopper: scales per row give bf16 alone."""
    if scale_a.numel() > 1 and out_dtype is not torch.bfloat16:
        raise ValueError("Only bf16 high precision output types are supported for row-wise scaling.")
    y = (a.double() @ b.double() * scale_a.double() * scale_b.double()).float()
    y = (y if bias is None else y + bias.float()).to(out_dtype)
    return y if out is None else out.copy_(y)


def test_results_in_fp32_come_from_bf16_where_torch_gives_nothing_else(monkeypatch) -> None:
    """`main_grad`, and a bias whose length cuBLAS does not take, ask for fp32 whatever the plan's dtype."""
    on(monkeypatch, (10, 0))
    monkeypatch.setattr(torch, "_scaled_mm", cutlass)
    torch.manual_seed(0)
    x, w = torch.randn(48, 64), torch.randn(40, 64)
    a, b = Plane.encode(formats.get(ROW), x), Plane.encode(formats.get(ROW), w)
    rule = scaled.ScaledProduct("cuBLAS FP8 product", fast=False)
    exact = a.dequantize(torch.float32).double() @ b.dequantize(torch.float32).double().t()
    bias = torch.randn(40, dtype=torch.bfloat16)
    main_grad = torch.ones(48, 40)
    rule.run_into(a, b, main_grad, True)
    # A rounding to bf16, 2^-8, and those of fp32 and fp16.
    bound = exact.abs() * 2**-7.9 + 1e-5
    assert ((main_grad.double() - 1 - exact).abs() <= bound).all()
    y = rule.run(a, b, torch.bfloat16, bias)
    both = (exact + bias.double()).abs()
    assert ((y.double() - exact - bias.double()).abs() <= bound + both * 2**-7.9).all()


def test_segments_do_likewise(monkeypatch) -> None:
    on(monkeypatch, (12, 0))
    monkeypatch.setattr(torch, "_scaled_mm", cutlass)
    codes = torch.randn(48, 64).to(torch.float8_e4m3fn), torch.randn(32, 64).to(torch.float8_e4m3fn).t()
    rows, cols = torch.rand(48, 1), torch.rand(1, 32)
    exact = codes[0].double() @ codes[1].double() * rows.double() * cols.double()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        y = segment_products.product(*codes, rows, cols, False, dtype=dtype)
        assert y.dtype is dtype
        assert ((y.double() - exact).abs() <= exact.abs() * 2**-7.9 + 1e-4).all()
    out = torch.full((48, 32), float("nan"))
    segment_products.SegmentProduct(*codes, rows, cols, False).compute_into(out, False, torch.float32)
    assert ((out.double() - exact).abs() <= exact.abs() * 2**-7.9 + 1e-4).all()


def test_a_trace_takes_the_dtype_of_a_product_as_a_constant(monkeypatch) -> None:
    on(monkeypatch, (12, 0))
    traced = torch.compile(
        lambda x: x.to(cublas.dtype_of_product(torch.float32, True)), fullgraph=True, backend="eager"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Dynamo warns where it looks into a cache
        assert traced(torch.ones(3)).dtype is torch.bfloat16
