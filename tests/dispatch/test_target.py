"""Devices other than the measured one: no kernels below compute capability 8.9, products that torch has there."""

import warnings

import pytest
import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import duotone
from duotone import formats, recipes
from duotone.dispatch import casts, gemms, scaled, segment_products, stages
from duotone.dispatch import target as targets
from duotone.dispatch.segment_products import dtype_of_product
from duotone.dispatch.target import Target, runs_kernels, scales_rows_to_fp32, target
from duotone.formats.elements import PLAIN
from duotone.tensor.plane_encoder import encode_plane

ROW, TENSOR, BLOCK, SQUARE = (f"fp8_e4m3_{kind}" for kind in ("row", "tensor", "1x128_fp32", "128x128_fp32"))


def on(arch: tuple[int, int], old: bool = False) -> Target:
    return Target("cuda", arch, (12, 8) if old else (13, 0))


@pytest.fixture
def gpus(monkeypatch):
    """As if the process had GPUs of these compute capabilities."""

    def have(*archs: tuple[int, int]) -> None:
        for cached in CACHED:  # an earlier test may have asked for a device without a GPU
            cached.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(archs))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: archs[index])
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda device: None)  # of a GPU that may not be here

    yield have
    for cached in CACHED:
        cached.cache_clear()


CACHED = (targets.cuda_target, targets.runs_kernels)


@pytest.mark.parametrize(("arch", "kernels"), [((7, 5), False), ((8, 0), False), ((8, 9), True), ((12, 0), True)])
def test_a_device_that_does_not_convert_to_fp8_runs_no_kernels(arch, kernels) -> None:
    """Triton has no FP8 casts there: a kernel would fail to compile."""
    assert on(arch).runs_kernels is (kernels and targets.has_triton())
    row = formats.get(ROW)
    assert casts.can_read_once(row, row, torch.bfloat16, on(arch)) is (kernels and targets.has_triton())


@pytest.mark.skipif(not targets.has_triton(), reason="Triton is not installed")
def test_each_device_of_a_process_has_its_own_target(gpus) -> None:
    gpus((9, 0), (8, 0))
    assert [target(name).arch for name in ("cuda", "cuda:0", "cuda:1")] == [(9, 0), (9, 0), (8, 0)]
    with FakeTensorMode():
        native, old = (torch.empty(256, 256, device=f"cuda:{i}") for i in range(2))
        assert (runs_kernels(native.get_device()), runs_kernels(old.get_device())) == (True, False)
        assert stages.stages_for(old) is PLAIN
    linear = duotone.Linear(32, 32, recipe=recipes.load("fp8-rowwise"), device="meta")
    kernels = [duotone.plan(linear, device=f"cuda:{i}", dtype=torch.bfloat16)[0].kernel for i in range(2)]
    assert kernels[0].startswith("cuBLAS FP8") and kernels[1].startswith("decode")


@pytest.mark.parametrize(
    ("name", "arch"), [("sm90", (9, 0)), ("sm_100", (10, 0)), ("sm90a", (9, 0)), ("sm120", (12, 0)), ("cpu", (0, 0))]
)
def test_an_architecture_need_not_be_here(name, arch) -> None:
    assert target(name).arch == arch


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("H100", (9, 0)),
        ("h200", (9, 0)),
        ("NVIDIA H200", (9, 0)),
        ("B200", (10, 0)),
        ("B300", (10, 3)),
        ("A100", (8, 0)),
    ]
    + [(name, (8, 9)) for name in ("4090", "RTX4090", "NVIDIA GeForce RTX 4090", "L40S")],
)
def test_a_gpu_can_be_named(name, arch) -> None:
    assert target(name).arch == arch


def test_each_name_of_a_gpu_stands_for_a_known_architecture() -> None:
    assert set(targets.GPUS.values()) <= set(targets.ARCHITECTURES)


@pytest.mark.parametrize("name", ["hopper", "4711", "cuda:x", "H1000"])
def test_other_names_of_devices_are_refused_in_one_line(name) -> None:
    with pytest.raises(duotone.UserError, match=f"unknown architecture '{name}'; write sm .* as sm90, a GPU's name"):
        target(name)


@pytest.mark.parametrize("name", ["sm9", "hopper", "smxy"])
def test_an_unknown_architecture_is_one_line(name) -> None:
    with pytest.raises(duotone.UserError, match=f"^unknown architecture '{name}'; write sm"):
        target(name)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("arch", "old", "any_dtype"),
    [((8, 9), False, False), ((9, 0), False, True), ((9, 0), True, False), ((10, 0), False, False)],
)
def test_scales_per_row_are_native_where_torch_gives_the_dtype(arch, old, any_dtype, dtype, fast) -> None:
    row, tensor = formats.get(ROW), formats.get(TENSOR)
    rule, reason = gemms.choose(gemms.GemmProblem(row, row, on(arch, old), dtype, fast))
    assert rule.native is (any_dtype or dtype is torch.bfloat16), reason
    assert gemms.choose(gemms.GemmProblem(tensor, tensor, on(arch, old), dtype, fast))[0].native


def test_products_of_blocks_want_the_cublas_that_has_them() -> None:
    new, old = (
        gemms.GemmProblem(formats.get(BLOCK), formats.get(SQUARE), on((9, 0), old), torch.bfloat16)
        for old in (False, True)
    )
    assert gemms.choose(new)[0].native and not gemms.choose(old)[0].native
    assert "12.9" in scaled.BlockScaledProduct().reject(old)


@pytest.mark.parametrize("built", [None, "12.6", "12.8", "12.9", "13.0"])
def test_the_age_of_cublas_is_that_of_torchs_cuda(built, monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", built)
    cuda = targets._built_with.__wrapped__()
    assert Target("cuda", (9, 0), cuda).has_new_cublas is (built not in ("12.6", "12.8"))


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
    a, b = encode_plane(formats.get(ROW), x), encode_plane(formats.get(ROW), w)
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


def test_a_trace_takes_the_dtype_of_a_product_as_a_constant() -> None:
    traced = torch.compile(
        lambda x: x.to(dtype_of_product(torch.float32, True, scales_rows_to_fp32(x.get_device()))),
        fullgraph=True,
        backend="eager",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Dynamo warns where it looks into a cache
        assert traced(torch.ones(3)).dtype is torch.bfloat16
