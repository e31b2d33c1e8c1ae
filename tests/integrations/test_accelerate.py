"""Accelerator: quantized parameters and delayed states survive save_state and load_state; hooks set before convert."""

import pytest
import torch
from causal import batch, llama
from packages import require

import duotone

accelerate = require("accelerate")


def trained(recipe: str, quantized: bool):
    accelerator = accelerate.Accelerator(cpu=True)
    model = duotone.convert(llama(), recipe)
    if quantized:
        duotone.convert_parameters(model, recipe)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    step(accelerator, model, optimizer, 0)
    return accelerator, model, optimizer


def step(accelerator, model, optimizer, at: int) -> float:
    with duotone.autocast(recipe=model.model.layers[0].mlp.up_proj.recipe):
        loss = model(input_ids=batch(at), labels=batch(at)).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize(("recipe", "quantized"), [("fp8-delayed", False), ("mxfp8", True)])
def test_load_state_continues_where_save_state_was(recipe: str, quantized: bool, tmp_path) -> None:
    accelerator, model, optimizer = trained(recipe, quantized)
    accelerator.save_state(tmp_path)
    losses = [step(accelerator, model, optimizer, at) for at in (1, 2)]
    accelerator.load_state(tmp_path)
    assert [step(accelerator, model, optimizer, at) for at in (1, 2)] == losses


def test_offloading_hooks_before_convert_follow_the_recipe() -> None:
    plain = duotone.convert(llama(), "mxfp8").eval()
    model = accelerate.cpu_offload(llama(), execution_device="cpu").eval()
    duotone.convert(model, "mxfp8")
    assert torch.equal(model(batch(0)).logits, plain(batch(0)).logits)
