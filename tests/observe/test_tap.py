"""Taps: the same bits, and the statistics of what they lost."""

import copy
import math

import pytest
import torch
from torch import nn

import duotone
from duotone import formats, observe, recipes
from duotone.observe.tap import measure
from duotone.tensor import Plane


@pytest.mark.parametrize("name", recipes.names())
def test_a_tapped_recipe_computes_the_same_bits(name: str) -> None:
    recipe = recipes.load(name)
    start = duotone.convert(nn.Linear(96, 64, dtype=torch.bfloat16), recipe)
    x, dy = torch.randn(40, 96).bfloat16(), torch.randn(40, 64).bfloat16()
    outcomes = []
    for used in (recipe, observe.tap(recipe, observe.Tap())):
        m = copy.deepcopy(start)
        leaf = x.clone().requires_grad_()
        with duotone.autocast(recipe=used):
            y = m(leaf)
        y.backward(dy)
        outcomes.append((y, leaf.grad, m.weight.grad.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def test_rows_name_module_role_plane_and_format() -> None:
    store = observe.Tap()
    m = duotone.convert(nn.ModuleDict({"proj": nn.Linear(96, 64)}), recipes.load("mxfp8-fwd-nvfp4-bwd"))
    with duotone.autocast(recipe=observe.tap(recipes.load("mxfp8-fwd-nvfp4-bwd"), store)):
        for _ in range(3):
            m["proj"](torch.randn(40, 96).requires_grad_()).square().sum().backward()
    rows = {(row["module"], row["role"], row["plane"]): row for row in store.rows()}
    assert set(rows) == {("proj", r, p) for r in ("input", "weight", "grad_output") for p in ("rowwise", "columnwise")}
    assert all(row["samples"] == 3 for row in rows.values())
    assert rows["proj", "weight", "columnwise"]["format"] == "nvfp4"
    # E4M3 keeps 4 significant bits and E2M1 2: about 31 and 20 dB on normal data.
    assert 28 < rows["proj", "input", "rowwise"]["snr_db"] < 34
    assert 17 < rows["proj", "input", "columnwise"]["snr_db"] < 23


def stats(x: torch.Tensor, name: str, **given) -> dict[str, float]:
    fmt = formats.get(name)
    plane = Plane(fmt, fmt.encode(x, **given), tuple(x.shape))
    sums, amax = measure(x, plane)
    return {**dict(zip(observe.tap.__globals__["FIELDS"], sums.tolist(), strict=True)), "amax": amax.item()}


def test_underflow_and_saturation_are_counted_on_known_values() -> None:
    x = torch.tensor([[448.0, 2.0**-10, 2.0**-11, 0.0, 1000.0, -500.0]])
    got = stats(x, "fp8_e4m3_tensor", scale=torch.ones(1))
    # 2^-10 ties to even, which is 0, and 2^-11 is below; 1000 and -500 exceed 448.
    assert (got["nonzero"], got["underflowed"], got["saturated"], got["elements"]) == (5, 2, 2, 6)
    assert got["amax"] == 1000.0
    assert got["noise"] == 2.0**-20 + 2.0**-22 + 552.0**2 + 52.0**2
    assert got["signal"] == pytest.approx(x.double().square().sum().item())


def test_elements_that_are_not_finite_are_left_out() -> None:
    x = torch.tensor([[1.0, math.nan, math.inf, -2.0]])
    got = stats(x, "fp8_e4m3_tensor", scale=torch.ones(1))
    assert (got["elements"], got["signal"], got["noise"], got["amax"]) == (2, 5.0, 0.0, 2.0)


def test_an_exact_plane_has_no_ratio() -> None:
    store = observe.Tap()
    m = duotone.convert(nn.Linear(32, 32), recipes.load("bf16"))
    with duotone.autocast(recipe=observe.tap(recipes.load("bf16"), store)):
        m(torch.randn(4, 32))
    assert all(row["snr_db"] is None and row["underflow"] == row["saturation"] == 0 for row in store.rows())
