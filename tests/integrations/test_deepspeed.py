"""DeepSpeed needs no entry: converted models train under ZeRO, and resume with the bits of a run that went on."""

import pytest
import torch
from packages import require
from torch import nn

import duotone

deepspeed = require("deepspeed")
WARNINGS = ["ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"]  # its own
pytestmark = pytest.mark.filterwarnings(*WARNINGS)


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "linear", nn.functional.linear)  # ZeRO 3 replaces it, and leaves it so
        address = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        for name, value in {**address, "DS_ACCELERATOR": "cpu"}.items():
            patch.setenv(name, value)
        place = tmp_path_factory.mktemp("rendezvous") / "file"
        torch.distributed.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=1)
        deepspeed.init_distributed("gloo")
        yield
        torch.distributed.destroy_process_group()


def start(stage: int, recipe: str):
    torch.manual_seed(0)
    model = duotone.convert(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), recipe)
    config = {
        "train_micro_batch_size_per_gpu": 32,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def steps(engine, inputs: torch.Tensor) -> list[float]:
    losses = []
    for x in inputs:
        loss = (engine(x) - x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("stage", "recipe"), [(0, "nvfp4"), (1, "fp8-delayed"), (2, "mxfp8"), (3, "fp8-delayed")])
def test_a_resumed_run_has_the_losses_of_one_that_went_on(stage: int, recipe: str, tmp_path) -> None:
    inputs = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    engine, fresh = start(stage, recipe), start(stage, recipe)
    steps(engine, inputs[:2])
    engine.save_checkpoint(str(tmp_path), client_state={"duotone": duotone.rng_state(engine.module)})
    losses = steps(engine, inputs[2:])
    _, state = fresh.load_checkpoint(str(tmp_path))
    duotone.load_rng_state(fresh.module, state["duotone"])
    assert steps(fresh, inputs[2:]) == losses
