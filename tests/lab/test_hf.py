"""Models of transformers in the laboratory: sizes, weights, losses, and what is refused."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import duotone
from duotone import recipes
from duotone.errors import UserError
from duotone_lab.training import checkpoint, models, presets
from duotone_lab.training.comparison import planned
from duotone_lab.training.config import TrainConfig
from duotone_lab.training.trainer import Trainer
from later import Later

transformers = Later("transformers")

TINY = presets.get("tiny")
LLAMA = "hf:LlamaForCausalLM"


def llama_config(**changes):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"vocab_size": 300, "max_position_embeddings": 64, "attention_dropout": 0.5}
    return transformers.LlamaConfig(**sizes | changes)


@pytest.fixture
def folder(tmp_path):
    """A folder with a config.json alone."""
    llama_config().save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def tokens():
    return torch.randint(0, 256, (2, TINY.model.context))


def test_a_class_is_built_in_the_sizes_of_the_preset_and_keeps_its_names():
    model = models.build(LLAMA, TINY, 0)
    sizes, config = TINY.model, model.config
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (sizes.dim, sizes.layers, 256)
    assert model.model.layers[1].mlp.gate_proj.weight.shape == (sizes.hidden, sizes.dim)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "model.layers.1.self_attn.q_proj" in dict(model.named_modules())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_the_loss_is_the_mean_cross_entropy_of_the_models_logits():
    model = models.build(LLAMA, TINY, 0)
    plain = transformers.LlamaForCausalLM(model.config)
    plain.load_state_dict(model.state_dict())
    inputs, targets = tokens(), tokens()
    logits = plain(input_ids=inputs).logits
    torch.testing.assert_close(model(inputs, targets), F.cross_entropy(logits.flatten(0, 1), targets.flatten()))


def test_weights_depend_on_the_seed_alone_and_torchs_generator_stays():
    state = torch.get_rng_state()
    first, same_seed, other = (models.build(LLAMA, TINY, seed).model.embed_tokens.weight for seed in (5, 5, 6))
    assert torch.equal(first, same_seed) and not torch.equal(first, other)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MixtralForCausalLM", "GPT2LMHeadModel", "BertLMHeadModel"])
def test_no_model_sees_the_byte_that_it_predicts_or_drops_anything(name):
    """GPT-2 and BERT drop a tenth by their own configs; BERT sees every byte unless it is told to be a decoder."""
    model = models.build(f"hf:{name}", TINY, 0)
    inputs = tokens()
    changed = inputs.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 256
    early = torch.full_like(inputs, -100)  # no loss where the target is -100
    early[:, :20] = inputs[:, 1:21]
    assert model.training and torch.equal(model(inputs, early), model(inputs, early))
    torch.testing.assert_close(model(inputs, early), model(changed, early))
    assert abs(model(inputs, inputs).item() - model(changed, inputs).item()) > 1e-4


def test_a_folder_without_weights_gives_random_ones(folder):
    model = models.build(f"hf:{folder}", TINY, 0)
    assert type(model).__name__ == "LlamaForCausalLM" and model.config.hidden_size == 32
    assert model.config.attention_dropout == 0
    description = models.describe(f"hf:{folder}", TINY)
    assert description == f"hf:{folder}: llama, 1 layers of 32, random weights"


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_folder_with_weights_gives_them_in_fp32_whatever_the_seed(folder, file):
    saved = transformers.LlamaForCausalLM(llama_config()).bfloat16()
    saved.save_pretrained(folder)
    if file != "model.safetensors":
        (folder / "model.safetensors").unlink()
        torch.save(saved.state_dict(), folder / file)
    for seed in (0, 1):
        model = models.build(f"hf:{folder}", TINY, seed)
        for name, parameter in model.named_parameters():
            assert parameter.dtype == torch.float32 and torch.equal(parameter, saved.get_parameter(name).float())
    assert "its own weights" in models.describe(f"hf:{folder}", TINY)


def test_the_plan_needs_no_weights_and_names_what_stays():
    rows = planned(TrainConfig(TINY, steps=1, model="hf:MixtralForCausalLM"), recipes.load("mxfp8"))
    results = {(row.module, row.gemm): row for row in rows}
    assert results["model.layers.0.self_attn.q_proj", "wgrad"].a == "mxfp8_e4m3"
    assert results["lm_head", "fprop"].reason == "kept in high precision by a rule"
    assert "MixtralTopKRouter holds weight (8, 64) itself" in results["model.layers.1.mlp.gate", "-"].reason


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf:NoSuchModel", "hf:NoSuchModel is neither a folder with a config.json nor a causal language model"),
        ("hf:BertModel", "hf:BertModel is neither"),
        ("hf:{tmp}", "is neither a folder with a config.json"),
        ("hf:", "hf: is neither"),
        ("hf:{tmp}/small", "has vocab_size 100, but the preset tiny trains on bytes and needs at least 256"),
        ("hf:{tmp}/short", "has max_position_embeddings 16, but the preset tiny"),
        ("hf:{tmp}/vision", "cannot be built"),
        ("hf:{tmp}/unreadable", "cannot be built"),
        ("hf:{tmp}/damaged", "cannot be built"),
        ("hf:{tmp}/headless", "lack cls.predictions"),
    ],
)
def test_what_cannot_be_trained_is_a_one_line_error(tmp_path, name, message):
    llama_config(vocab_size=100).save_pretrained(tmp_path / "small")
    llama_config(max_position_embeddings=16).save_pretrained(tmp_path / "short")
    for problem, text in {"vision": '{"model_type": "vit"}', "unreadable": "{"}.items():
        (tmp_path / problem).mkdir()
        (tmp_path / problem / "config.json").write_text(text)
    llama_config().save_pretrained(tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"no tensors")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    transformers.BertModel(transformers.BertConfig(vocab_size=256, **sizes)).save_pretrained(tmp_path / "headless")
    with pytest.raises(UserError) as raised:
        models.build(name.format(tmp=tmp_path), TINY, 0)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_nothing_else_imports_transformers():
    root = Path(duotone.__file__).parents[1]
    results = {path for path in root.rglob("*.py") if "import transformers" in path.read_text()}
    assert results == {root / "duotone_lab/training/hf.py", root / "duotone/integrations/transformers.py"}


def test_without_transformers_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match="needs transformers, which is not installed: pip install 'transformers>=5'"):
        models.describe(LLAMA, TINY)


def test_training_lowers_the_loss_and_a_restored_trainer_continues_bit_for_bit(tmp_path, config, corpus):
    config = dataclasses.replace(config, model=LLAMA, steps=20)
    straight = Trainer(config, recipes.load("nvfp4"), corpus)
    losses = [straight.step() for _ in range(20)]
    assert losses[0] > 5.3 and losses[-1] < 4.9
    first = Trainer(config, recipes.load("nvfp4"), corpus)
    assert [first.step() for _ in range(3)] == losses[:3]
    path = checkpoint.save(tmp_path, first.checkpoint({}))
    second = Trainer(config, recipes.load("nvfp4"), corpus)
    second.restore(checkpoint.load(path), path)
    assert [second.step() for _ in range(17)] == losses[3:]
    assert second.heldout_loss() == straight.heldout_loss()


def test_a_checkpoint_of_another_model_or_a_changed_config_is_refused(tmp_path, config, corpus, folder):
    mxfp8 = recipes.load("mxfp8")
    config = dataclasses.replace(config, model=f"hf:{folder}")
    path = checkpoint.save(tmp_path / "saved", Trainer(config, mxfp8, corpus).checkpoint({}))
    saved = checkpoint.load(path)
    for other in ("gpt", LLAMA):
        with pytest.raises(
            UserError, match=r"has another config: model 'hf:.* there, .* resume with what it was made with"
        ):
            Trainer(dataclasses.replace(config, model=other), mxfp8, corpus).restore(saved, path)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(text | {"hidden_act": "relu"}))
    with pytest.raises(UserError, match=r"llama has changed since the checkpoint .*: restore its config.json"):
        Trainer(config, mxfp8, corpus).restore(saved, path)
