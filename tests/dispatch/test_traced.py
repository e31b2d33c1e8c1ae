"""Casts as ops of a graph: shapes without values are those that a cast has, also where nothing is cast."""

import pytest
import torch

from duotone import formats
from duotone.dispatch.cast_ops import cast_planes, cast_two_level, empty_planes

NAMES = ["fp8_e4m3_tensor", "fp8_e5m2_row", "fp8_e4m3_1x128", "fp8_e4m3_128x128", "mxfp8_e4m3", "mxfp8_e4m3_32x32"]


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_matrix_has_empty_codes_and_scales_of_its_grid(name) -> None:
    fmt = formats.get(name)
    for shape in ((0, 256), (128, 0)):
        parts = cast_planes(torch.empty(shape, dtype=torch.bfloat16), name, name, True, None)
        for at, (m, k) in ((0, shape), (2, shape[::-1])):
            specs = fmt.parts(m, k)
            assert parts[at].shape == specs["codes"].shape and parts[at].numel() == 0
            if at == 2 and name == "fp8_e4m3_tensor":
                assert parts[3].shape == (0,)  # one scale for both planes is one result of the op
            else:
                assert parts[at + 1].shape == specs["scale"].shape and parts[at + 1].dtype is specs["scale"].dtype


def test_a_plane_that_is_not_asked_for_is_empty() -> None:
    row = empty_planes(torch.empty(128, 256), "mxfp8_e4m3", "")
    assert row[0].shape == (128, 256) and row[2].numel() == row[3].numel() == 0
    assert row[1].shape == (128, 8) and row[1].stride() == (1, 128)  # as cuBLAS reads scales of blocks


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_rht_sr", "nvfp4_row", "nvfp4_16x16"])
def test_parts_of_nvfp4_without_values_are_those_of_the_format(name) -> None:
    """Also of an empty matrix, for which no kernel runs, and of sizes that end within a block."""
    fmt = formats.get(name)
    for device, shape in (("cpu", (0, 64)), ("meta", (100, 72))):
        x = torch.empty(shape, dtype=torch.bfloat16, device=device)
        op = cast_two_level if device == "cpu" else torch.ops.duotone.cast_two_level
        parts = op(x, name, name, True, None)
        for side, (m, k) in enumerate((shape, shape[::-1])):
            for part, spec in zip(parts[3 * side :], fmt.parts(m, k).values(), strict=False):
                assert part.shape == spec.shape and part.dtype is spec.dtype
    assert [part.numel() for part in torch.ops.duotone.cast_two_level(x, "", name, True, None)[:3]] == [0, 0, 0]
