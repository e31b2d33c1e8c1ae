"""Casts as ops of a graph: shapes without values are those that a cast has, also where nothing is cast."""

import pytest
import torch

from duotone import formats
from duotone.dispatch.casts import cast_planes, empty_planes

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
