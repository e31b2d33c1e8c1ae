"""Accelerator: quantized parameters and delayed states survive save_state and load_state; hooks set before convert."""

import gc
import weakref

import pytest
import torch
from causal import assert_same_bits, batch, llama
from packages import DEVICE, ON_CPU, require

import duotone

accelerate = require("accelerate")
from duotone.integrations.accelerate import prepare  # noqa: E402


def trained(recipe: str, quantized: bool):
    accelerator = accelerate.Accelerator(cpu=ON_CPU)
    model = duotone.convert(llama(), recipe)
    if quantized:
        duotone.convert_parameters(model, recipe)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    step(accelerator, model, optimizer, 0)
    return accelerator, model, optimizer


def step(accelerator, model, optimizer, at: int) -> float:
    with duotone.autocast(recipe=model.model.layers[0].mlp.up_proj.recipe):
        tokens = batch(at).to(accelerator.device)
        loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.filterwarnings("ignore:.*of this update is lost")
@pytest.mark.parametrize(("recipe", "quantized"), [("fp8-delayed", False), ("mxfp8", True)])
def test_load_state_continues_where_save_state_was(recipe: str, quantized: bool, tmp_path) -> None:
    accelerator, model, optimizer = trained(recipe, quantized)
    accelerator.save_state(tmp_path)
    losses = [step(accelerator, model, optimizer, at) for at in (1, 2)]
    accelerator.load_state(tmp_path)
    assert [step(accelerator, model, optimizer, at) for at in (1, 2)] == losses


def test_offloading_hooks_before_convert_follow_the_recipe() -> None:
    plain = duotone.convert(llama(), "mxfp8").eval().to(DEVICE)
    model = accelerate.cpu_offload(llama(), execution_device=DEVICE).eval()
    duotone.convert(model, "mxfp8")
    tokens = batch(0).to(DEVICE)
    assert torch.equal(model(tokens).logits.to(DEVICE), plain(tokens).logits)


def run(recipe: str, quantized: bool = False):
    accelerator, model = accelerate.Accelerator(cpu=ON_CPU), llama()
    if quantized:
        duotone.convert_parameters(duotone.convert(model, recipe), recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return accelerator, *prepare(accelerator, model, optimizer, recipe=None if quantized else recipe)


@pytest.mark.filterwarnings("ignore:.*of this update is lost")
@pytest.mark.parametrize(("recipe", "quantized"), [("nvfp4", False), ("fp8-delayed", False), ("nvfp4", True)])
def test_prepare_converts_and_a_fresh_run_resumes_with_the_bits_of_one_that_went_on(
    recipe, quantized, tmp_path
) -> None:
    accelerator, model, optimizer = run(recipe, quantized)
    step(accelerator, model, optimizer, 0)
    accelerator.save_state(tmp_path)
    losses = [step(accelerator, model, optimizer, at) for at in (1, 2)]
    fresh = run(recipe, quantized)
    fresh[0].load_state(tmp_path)
    assert [step(*fresh, at) for at in (1, 2)] == losses
    assert_same_bits(duotone.rng_state(fresh[1]), duotone.rng_state(model))
    assert_same_bits(duotone.recipe_state(fresh[1]), duotone.recipe_state(model))


@pytest.mark.parametrize("other", ["fp8-current", "nvfp4", "fp8-delayed"])
def test_a_checkpoint_of_another_recipe_names_both(other: str, tmp_path) -> None:
    """fp8-current has no seeds and no delayed scales that could tell."""
    run("mxfp8", False)[0].save_state(tmp_path)
    with pytest.raises(
        duotone.UserError, match=rf"^the checkpoint was saved under mxfp8, [^\n]* follows {other};[^\n]*$"
    ):
        run(other, False)[0].load_state(tmp_path)


def test_prepare_refuses_in_one_line(monkeypatch) -> None:
    accelerator = accelerate.Accelerator(cpu=ON_CPU)
    with pytest.raises(duotone.UserError, match=r"^none of the objects is a model[^\n]*$"):
        prepare(accelerator, recipe="mxfp8")
    with pytest.raises(duotone.UserError, match=r"^nothing in the model follows recipes: give prepare a recipe[^\n]*$"):
        prepare(accelerator, llama())
    with pytest.raises(duotone.UserError, match=r"^[^\n]*mxfp9[^\n]*$"):
        prepare(accelerator, llama(), recipe="mxfp9")
    monkeypatch.setattr(accelerator.state, "_mixed_precision", "fp8")  # a CPU has none
    with pytest.raises(duotone.UserError, match=r'^mixed_precision="fp8" converts the model by another library[^\n]*$'):
        prepare(accelerator, llama(), recipe="mxfp8")


def test_models_that_the_accelerator_freed_leave_memory_and_checkpoints(tmp_path) -> None:
    """As find_executable_batch_size does it: free_memory, then prepare of a new model. Objects of others stay."""
    accelerator, other, freed = accelerate.Accelerator(cpu=ON_CPU), torch.nn.Linear(2, 2), []
    for _ in range(3):
        accelerator.free_memory()
        gc.collect()
        assert all(reference() is None for reference in freed)
        model = prepare(accelerator, torch.nn.Sequential(torch.nn.Linear(32, 32)), recipe="nvfp4", rules=())
        if not freed:
            accelerator.register_for_checkpointing(other)
        freed.append(weakref.ref(accelerator.unwrap_model(model)))
        model(torch.randn(4, 32, device=accelerator.device)).sum().backward()
        seed = duotone.rng_state(model)
        accelerator.save_state(tmp_path)
        del model
    fresh = accelerate.Accelerator(cpu=ON_CPU)
    model = prepare(fresh, torch.nn.Sequential(torch.nn.Linear(32, 32)), recipe="nvfp4", rules=())
    fresh.register_for_checkpointing(torch.nn.Linear(2, 2))
    fresh.load_state(tmp_path)
    assert_same_bits(duotone.rng_state(model), seed)


def test_several_models_of_one_accelerator_all_keep_their_states() -> None:
    accelerator = accelerate.Accelerator(cpu=ON_CPU)
    first = prepare(accelerator, torch.nn.Linear(32, 32), recipe="nvfp4", rules=())
    second = prepare(accelerator, torch.nn.Linear(32, 32), recipe="nvfp4", rules=())
    assert [state.reference() for state in accelerator._custom_objects] == [first, second]


def test_parameters_that_accelerate_offloads_are_not_quantized() -> None:
    """Their values come back at each forward, in a way that knows no planes."""
    model = duotone.convert(accelerate.cpu_offload(llama(), execution_device=DEVICE), "mxfp8")
    with pytest.raises(duotone.UserError, match=r"^the weight of [\w.]+ is offloaded by accelerate, [^\n]*$"):
        duotone.convert_parameters(model, "mxfp8")


@pytest.mark.parametrize("kind", ["fused", "split"])
def test_weights_that_share_memory_are_all_in_a_checkpoint_and_share_it_afterwards(kind: str, tmp_path) -> None:
    """accelerate writes one tensor for each memory, so that k, v and up of a fused model were missing."""
    accelerator = accelerate.Accelerator(cpu=ON_CPU)
    if kind == "fused":
        model = duotone.convert(llama(), "mxfp8", fuse=True)
    else:
        model = duotone.MultiheadAttention(64, 2, recipe="mxfp8")
    model.register_buffer("mean", torch.ones(8))
    model.register_buffer("part_of_mean", model.mean[:4])  # accelerate leaves out one name of two
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, _ = prepare(accelerator, model, optimizer)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    memories = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(memories) < len(expected)
    accelerator.save_state(tmp_path)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    accelerator.load_state(tmp_path)
    assert_same_bits(dict(model.named_parameters()), expected)
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == len(memories)
