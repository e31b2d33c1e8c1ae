"""`save_pretrained` of models with quantized parameters means high precision, and so do checkpoints of Trainer."""

import pytest
import torch
from causal import assert_same_bits, batch, llama, mixtral
from packages import ON_CPU, require

import duotone

transformers = require("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*of this update is lost")  # Trainer's optimizer keeps no masters


def low_precision(recipe="mxfp8", build=llama, **changes):
    model = duotone.convert(build(**changes), recipe)
    return duotone.convert_parameters(model, recipe)


def values(model):
    return {name: p.dequantize() if hasattr(p, "planes") else p for name, p in model.named_parameters()}


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8-current"])
@pytest.mark.parametrize("size", ["1GB", "20KB"], ids=["one file", "shards"])
def test_the_values_come_back_in_a_plain_model(recipe: str, size: str, tmp_path) -> None:
    model = low_precision(recipe)
    model.save_pretrained(tmp_path, max_shard_size=size)
    plain, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert len(list(tmp_path.glob("*.safetensors"))) > (size == "20KB")
    assert all(torch.equal(p, values(model)[name]) for name, p in plain.named_parameters())


def test_what_was_loaded_into_a_plain_model_is_saved_in_high_precision(tmp_path) -> None:
    duotone.export(llama(), tmp_path / "served", scheme="MXFP8", dtype=torch.float32)
    loaded = duotone.load(tmp_path / "served", llama())
    loaded.save_pretrained(tmp_path / "plain")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert all(torch.equal(p, values(loaded)[name]) for name, p in plain.named_parameters())


def test_experts_are_saved_in_high_precision(tmp_path) -> None:
    model = low_precision(build=mixtral)
    model.save_pretrained(tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(p, values(model)[name]) for name, p in plain.named_parameters())


def test_a_trainer_saves_checkpoints_of_quantized_parameters(tmp_path) -> None:
    require("accelerate")
    model = low_precision()
    data = [{"input_ids": row, "labels": row} for row in batch(0)]
    options = transformers.TrainingArguments(
        tmp_path, max_steps=2, save_steps=1, report_to=[], use_cpu=ON_CPU, disable_tqdm=True
    )
    transformers.Trainer(model, options, train_dataset=data).train()
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    assert all(torch.equal(p, values(model)[name].cpu()) for name, p in plain.named_parameters())


@pytest.mark.parametrize("size", ["1GB", "20KB"], ids=["one file", "shards"])
def test_delayed_states_stay_out_of_what_a_plain_model_loads(size: str, tmp_path) -> None:
    model = duotone.convert(llama(), "fp8-delayed")
    model(input_ids=batch(0), labels=batch(0)).loss.backward()
    model.save_pretrained(tmp_path, max_shard_size=size)
    plain, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert all(torch.equal(p, values(model)[name]) for name, p in plain.named_parameters())
    again = duotone.convert(llama(), "fp8-delayed")
    again.load_state_dict(model.state_dict())  # there they are
    assert_same_bits(duotone.recipe_state(again), duotone.recipe_state(model))


@pytest.mark.parametrize("build", [llama, mixtral])
def test_a_reverted_model_saves_the_values_of_its_quantized_parameters(build, tmp_path) -> None:
    model = duotone.revert(low_precision(build=build))
    model.save_pretrained(tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(p, values(model)[name]) for name, p in plain.named_parameters())
