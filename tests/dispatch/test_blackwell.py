"""Products of compute capability 10: the order of their scales, and that no other device is given them."""

import pytest
import torch

from duotone import formats
from duotone.dispatch import gemms
from duotone.dispatch.target import target


def problem(a: str, b: str, device: str) -> gemms.GemmProblem:
    return gemms.GemmProblem(formats.get(a), formats.get(b), target(device), torch.bfloat16)


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (130, 9), (300, 16)], ids=str)
def test_scales_are_swizzled_as_cublas_documents(shape) -> None:
    rows, cols = shape
    scale = torch.randint(1, 256, shape, dtype=torch.uint8)
    flat = gemms.swizzled(scale)
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
def test_only_compute_capability_10_is_given_them(name) -> None:
    for device, native in (("cuda", False), ("sm90", False), ("sm100", True), ("sm120", True)):
        rule, reason = gemms.choose(problem(name, name, device))
        assert rule.native is native
        assert ("unproven" in reason) is native
    assert not gemms.choose(problem(name, name, "cpu"))[0].native


def test_what_they_do_not_take_is_said() -> None:
    assert "E5M2" in gemms.MXFP8.reject(problem("mxfp8_e5m2", "mxfp8_e5m2", "sm100"))
    assert "over 32" in gemms.MXFP8.reject(problem("mxfp8_e4m3", "nvfp4", "sm100"))
    assert "FP8 codes" in gemms.MXFP8.reject(problem("mxfp6_e2m3", "mxfp8_e4m3", "sm100"))
    assert "transforms" in gemms.NVFP4.reject(problem("nvfp4_rht", "nvfp4", "sm100"))
    assert gemms.NVFP4.reject(problem("nvfp4_rht", "nvfp4_rht_sr", "sm100")) == ""


@pytest.mark.parametrize(("device", "native"), [("sm89", False), ("sm90", True), ("sm100", False), ("sm120", False)])
def test_products_of_blocks_of_128_are_for_hopper(device, native) -> None:
    rule, _ = gemms.choose(problem("fp8_e4m3_1x128", "fp8_e4m3_128x128", device))
    assert rule.native is native
    assert gemms.choose(problem("fp8_e4m3_row", "fp8_e4m3_row", device))[0].native
