"""torchao's optimizers with low-bit states train quantized parameters. Their compiled steps write codes and scales."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from packages import require
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import duotone
from duotone.tensor import QuantizedTensor

optim = require("torchao", "torchao.optim")
WARNINGS = ["ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"]  # its own
pytestmark = pytest.mark.filterwarnings(*WARNINGS)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [
    ("AdamW8bit", "mxfp8"),
    ("AdamW4bit", "nvfp4"),
    ("AdamWFp8", "fp8-current"),
    ("AdamW8bit", "fp8-delayed"),
    ("AdamW8bit", "fp8-block"),
]


def build(recipe: str, device: str = DEVICE) -> nn.Sequential:
    """Weights of 256x160: large enough for casts in pieces. One side is no multiple of 128."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(160, 256), nn.GELU(), nn.Linear(256, 160))
    return duotone.convert_parameters(duotone.convert(model.to(device), recipe), recipe)


def values_of(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.dequantize() if isinstance(parameter, QuantizedTensor) else parameter.detach()


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_a_step_writes_what_the_same_step_gives_plain_parameters(
    name: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A twin takes each step on plain copies of its parameters, and copies the results back in eager code."""
    if recipe != "mxfp8":  # inductor takes 10 to 20 s for each
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    model, twin = build(recipe), build(recipe)
    plain = [nn.Parameter(values_of(p).clone()) for p in twin.parameters()]
    optimizer, oracle = (getattr(optim, name)(params, lr=3e-2) for params in (model.parameters(), plain))
    x, y = torch.randn(2, 64, 160, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    losses = []
    for _ in range(3):
        for one in (model, twin):
            one.zero_grad()
            loss = (one(x) - y).square().mean()
            loss.backward()
            losses.append(loss.item())
        with torch.no_grad():
            for copy, parameter in zip(plain, twin.parameters(), strict=True):
                copy.copy_(values_of(parameter))
                copy.grad = parameter.grad
        version = model[0].weight._version
        optimizer.step()
        oracle.step()
        assert model[0].weight._version > version
        with torch.no_grad():
            for copy, parameter in zip(plain, twin.parameters(), strict=True):
                parameter.copy_(copy)
        for (key, weight), reference in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert isinstance(weight, QuantizedTensor) == key.endswith("weight")
            parts = (weight.parts, reference.parts) if isinstance(weight, QuantizedTensor) else ([weight], [reference])
            assert all(map(torch.equal, *parts)), key
    assert losses[::2] == losses[1::2]
    assert losses[-1] < 0.8 * losses[0]


def test_compiled_steps_over_shards_write_the_planes_of_one_process() -> None:
    """mxfp8 needs nothing of other ranks, so each weight is one op. Inductor failed on the planes of a shard as ops."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, sharded = (build("mxfp8", "cpu") for _ in range(2))
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        optimizers = [optim.AdamW8bit(one.parameters(), lr=3e-2) for one in (model, sharded)]
        x = torch.randn(64, 160, generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            for one, optimizer in zip((model, sharded), optimizers, strict=True):
                one(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        for weight, reference in zip(model.parameters(), sharded.parameters(), strict=True):
            assert torch.equal(values_of(weight), values_of(reference.to_local()))
    finally:
        dist.destroy_process_group()
