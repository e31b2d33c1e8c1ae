"""Products of compute capability 10: the order of their scales, and that no other device is given them."""

import pytest
import torch

from duotone import formats
from duotone.dispatch import blackwell, cublas, gemms, scaled


def problem(a: str, b: str, device: str = "cuda") -> gemms.GemmProblem:
    return gemms.GemmProblem(formats.get(a), formats.get(b), device, torch.bfloat16)


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (130, 9), (300, 16)], ids=str)
def test_scales_are_swizzled_as_cublas_documents(shape) -> None:
    rows, cols = shape
    scale = torch.randint(1, 256, shape, dtype=torch.uint8)
    flat = blackwell.swizzled(scale)
    across = -(-cols // 4)
    assert flat.numel() == -(-rows // 128) * 128 * across * 4
    seen = torch.zeros_like(flat)
    for r in range(rows):
        for c in range(cols):
            tile = (r // 128) * across + c // 4
            at = tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
            assert flat[at] == scale[r, c]
            seen[at] = 1
    assert flat[seen == 0].eq(0).all()


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "nvfp4"])
def test_only_compute_capability_10_is_given_them(name, monkeypatch) -> None:
    for capability, native in (((0, 0), False), ((9, 0), False), ((10, 0), True), ((12, 0), True)):
        for module in (blackwell, cublas, scaled):
            monkeypatch.setattr(module, "capability", lambda capability=capability: capability)
        rule, reason = gemms.choose(problem(name, name))
        assert rule.native is native
        assert ("unproven" in reason) is native
    assert not gemms.choose(problem(name, name, "cpu"))[0].native


def test_what_they_do_not_take_is_said(monkeypatch) -> None:
    monkeypatch.setattr(blackwell, "capability", lambda: (10, 0))
    assert "E5M2" in blackwell.MXFP8.reject(problem("mxfp8_e5m2", "mxfp8_e5m2"))
    assert "over 32" in blackwell.MXFP8.reject(problem("mxfp8_e4m3", "nvfp4"))
    assert "FP8 codes" in blackwell.MXFP8.reject(problem("mxfp6_e2m3", "mxfp8_e4m3"))
    assert "transforms" in blackwell.NVFP4.reject(problem("nvfp4_rht", "nvfp4"))
    assert blackwell.NVFP4.reject(problem("nvfp4_rht", "nvfp4_rht_sr")) == ""


@pytest.mark.parametrize(
    ("capability", "native"), [((8, 9), False), ((9, 0), True), ((10, 0), False), ((12, 0), False)]
)
def test_products_of_blocks_of_128_are_for_hopper(capability, native, monkeypatch) -> None:
    for module in (blackwell, cublas, scaled):
        monkeypatch.setattr(module, "capability", lambda: capability)
    rule, _ = gemms.choose(problem("fp8_e4m3_1x128", "fp8_e4m3_128x128"))
    assert rule.native is native
    assert gemms.choose(problem("fp8_e4m3_row", "fp8_e4m3_row"))[0].native
