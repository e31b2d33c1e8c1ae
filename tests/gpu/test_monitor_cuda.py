"""On a CUDA device: a monitored step waits for nothing, and its rows are those of a tap."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import duotone
from duotone import observe, recipes
from duotone.observe.step_statistics import StepStatistics

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device; run `PYTHONPATH=src python -m pytest tests/gpu` on one",
)
NAMES = ("bf16", "fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4")


def mlp(recipe: str, width: int = 512) -> nn.Module:
    torch.manual_seed(0)
    model = duotone.LayerNormMLP(
        width, 2 * width, params_dtype=torch.bfloat16, recipe=recipes.load(recipe), device="cuda"
    )
    return duotone.assign_names(nn.Sequential(model))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("recipe", NAMES)
def test_a_sampled_step_does_not_synchronise(recipe: str, tmp_path: Path) -> None:
    model, x = mlp(recipe), torch.randn(1024, 512, device="cuda").bfloat16()

    def step(monitor: observe.Monitor) -> None:
        model(x).sum().backward()
        monitor.step()

    with observe.Monitor(model, tmp_path / "m.jsonl", every=2) as monitor:
        for _ in range(3):  # what is new at first may wait
            step(monitor)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            monitor._write = monitor._sent.popleft
            step(monitor)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            del monitor._write
    assert {json.loads(line)["step"] for line in (tmp_path / "m.jsonl").read_text().splitlines()} >= {1, 2}


@pytest.mark.parametrize("recipe", NAMES[1:])
def test_rows_are_those_of_a_tap(recipe: str) -> None:
    rows = []
    for sampler in (observe.Tap(), StepStatistics()):
        model = mlp(recipe)
        torch.manual_seed(1)
        with duotone.autocast(recipe=observe.with_statistics(recipes.load(recipe), sampler)):
            y = model(torch.randn(1024, 512, device="cuda").bfloat16())
        y.sum().backward()
        rows.append(sampler.rows() if isinstance(sampler, observe.Tap) else sampler.send({}).read()[0])
    assert [(row["module"], row["role"], row["plane"], row["format"]) for row in rows[0]] == [
        (row["module"], row["role"], row["plane"], row["format"]) for row in rows[1]
    ]
    for whole, sampled in zip(*rows, strict=True):
        assert sampled["amax"] == pytest.approx(whole["amax"], rel=1e-4)
        if whole["snr_db"] is not None and whole["role"] != "grad_output":  # whose rows are all the same here
            assert sampled["snr_db"] == pytest.approx(whole["snr_db"], abs=0.5)
