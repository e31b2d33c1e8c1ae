"""Ctrl-C while a region is entered or left: what runs afterwards is outside of it."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import duotone
from interrupting import interrupt

REGIONS: dict[str, Callable[[], object]] = {
    "autocast": lambda: duotone.autocast("nvfp4"),
    "quantized_model_init": lambda: duotone.quantized_model_init(recipe="mxfp8"),
}


@pytest.mark.filterwarnings("ignore:.*nothing in it follows")
@pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)
@pytest.mark.parametrize("is_nested", [False, pytest.param(True, marks=pytest.mark.rest)])
def test_an_interrupted_region_is_over(region: Callable[[], object], is_nested: bool) -> None:
    model, x = duotone.convert(nn.Sequential(nn.Linear(64, 64)), "mxfp8", rules=()), torch.randn(32, 64)
    want = model(x)

    def run() -> None:
        with region():
            pass

    def nested() -> None:
        with duotone.autocast("fp8-current"):
            run()

    call = nested if is_nested else run
    for at in range(1, interrupt(call, 0) + 1):
        interrupt(call, at)
        assert torch.equal(model(x), want), at
        assert not isinstance(duotone.Linear(64, 64).weight, duotone.QuantizedTensor), at
        with duotone.autocast("nvfp4"):
            assert not torch.equal(model(x), want)
        assert torch.equal(model(x), want), at
