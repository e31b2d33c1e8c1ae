"""Casts in graphs and predictions: planes without values have the shapes and memory orders that a cast gives."""

import copy

import pytest
import torch

import duotone
from duotone import formats, recipes
from duotone.dispatch import stages
from duotone.dispatch.empty_planes import empty_planes, named_parts

NAMES = ["fp8_e4m3_tensor", "fp8_e5m2_row", "fp8_e4m3_1x128", "fp8_e4m3_128x128", "mxfp8_e4m3", "mxfp8_e4m3_32x32"]


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_matrix_has_empty_codes_and_scales_of_its_grid(name) -> None:
    fmt = formats.get(name)
    for shape in ((0, 256), (128, 0)):
        parts = empty_planes(torch.empty(shape, dtype=torch.bfloat16), fmt, fmt)
        assert len(parts) == (3 if name == "fp8_e4m3_tensor" else 4)  # one scale for both planes is one result
        for plane, (m, k) in zip(named_parts(fmt, fmt, parts), (shape, shape[::-1]), strict=True):
            specs = fmt.parts(m, k)
            assert plane["codes"].shape == specs["codes"].shape and plane["codes"].numel() == 0
            assert plane["scale"].shape == specs["scale"].shape and plane["scale"].dtype is specs["scale"].dtype


def test_a_plane_that_is_not_asked_for_has_no_parts() -> None:
    fmt = formats.get("mxfp8_e4m3")
    codes, scale = empty_planes(torch.empty(128, 256), fmt, None)
    assert codes.shape == (128, 256)
    assert scale.shape == (128, 8) and scale.stride() == (1, 128)  # as cuBLAS reads scales of blocks
    assert named_parts(fmt, None, [codes, scale]) == ({"codes": codes, "scale": scale}, {})
    codes, scale = empty_planes(torch.empty(128, 256), None, fmt)
    assert codes.shape == (256, 128)
    assert named_parts(None, fmt, [codes, scale]) == ({}, {"codes": codes, "scale": scale})


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_rht_sr", "nvfp4_row", "nvfp4_16x16"])
def test_parts_of_nvfp4_without_values_are_those_of_the_format(name) -> None:
    """Also of an empty matrix, for which no kernel runs, and of sizes that end within a block."""
    fmt = formats.get(name)
    for device, shape in (("cpu", (0, 64)), ("meta", (100, 72))):
        x = torch.empty(shape, dtype=torch.bfloat16, device=device)
        parts = empty_planes(x, fmt, fmt)
        for side, (m, k) in enumerate((shape, shape[::-1])):
            for part, spec in zip(parts[3 * side : 3 * side + 3], fmt.parts(m, k).values(), strict=True):
                assert part.shape == spec.shape and part.dtype is spec.dtype
    assert len(empty_planes(x, None, fmt)) == 3


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8-block"])
def test_casts_of_many_elements_have_the_bits_of_eager_code(name: str, monkeypatch) -> None:
    """From `COMPILE_FROM` elements, stages of traced code run as ops, and along memory where a plane lies turned."""
    monkeypatch.setattr(stages, "compiler_reason", lambda: "left out, as it takes long")
    torch.manual_seed(0)
    eager = duotone.Linear(192, 256, params_dtype=torch.bfloat16, recipe=recipes.load(name))
    traced = copy.deepcopy(eager)
    compiled = torch.compile(traced, backend="aot_eager", fullgraph=True)
    inputs = [torch.randn(320, 192).bfloat16().requires_grad_() for _ in range(2)]
    inputs[1].data.copy_(inputs[0])
    assert inputs[0].numel() > stages.COMPILE_FROM
    outputs = [call(x) for call, x in zip((eager, compiled), inputs, strict=True)]
    dy = torch.randn_like(outputs[0])
    for y in outputs:
        y.backward(dy)
    pairs = [outputs, [x.grad for x in inputs]]
    pairs += zip(*[[p.grad for p in module.parameters()] for module in (eager, traced)], strict=True)
    for one, other in pairs:
        assert torch.equal(one, other)
