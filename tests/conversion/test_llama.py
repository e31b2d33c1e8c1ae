"""LlamaForCausalLM converted: what is covered, the bits, training, and what transformers does with a model."""

import functools

import pytest
import torch
from causal import assert_same_bits, batch, gradients, llama, train
from safetensors.torch import load_file, save_file
from torch import nn

import duotone
from duotone import recipes
from duotone.recipes.builtin import BUILTIN
from later import Later

transformers = Later("transformers")

BOTH_HEADS = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


@BOTH_HEADS
def test_every_linear_is_covered_and_the_head_stays_in_high_precision(tied: bool) -> None:
    m = duotone.convert(llama(tie_word_embeddings=tied), recipes.MXFP8BlockScaling(strict=True))
    linears = {name for name, module in m.named_modules() if isinstance(module, nn.Linear)}
    assert len(linears) == 2 * 7 + 1
    rows = duotone.plan(m)
    for name in linears:
        formats = {plane for row in rows if row.module == name for plane in (row.a, row.b)}
        assert formats == ({"identity"} if name == "lm_head" else {"mxfp8_e4m3"})
    assert {row.reason for row in rows if row.module == "lm_head"} == {"kept in high precision by a rule"}
    assert {row.module for row in rows if row.gemm == "-"} == {"model.embed_tokens"}
    assert (m.lm_head.weight is m.model.embed_tokens.weight) == tied


@BOTH_HEADS
def test_under_identity_outputs_gradients_and_generated_tokens_are_those_of_the_plain_model(tied: bool) -> None:
    plain = llama(tie_word_embeddings=tied)
    converted = duotone.convert(llama(tie_word_embeddings=tied), recipes.load("bf16"))
    assert_same_bits(gradients(plain, batch(0)), gradients(converted, batch(0)))
    generated = [m.eval().generate(batch(1), max_new_tokens=8, do_sample=False) for m in (plain, converted)]
    assert torch.equal(*generated)


def test_revert_gives_back_the_classes_and_the_bits() -> None:
    plain, m = llama(), llama()
    kinds = [type(module) for module in m.modules()]
    duotone.convert(m, recipes.load("nvfp4"))
    changed = gradients(m, batch(0))
    duotone.revert(m)
    assert [type(module) for module in m.modules()] == kinds
    assert_same_bits(gradients(plain, batch(0)), gradients(m, batch(0)))
    assert not torch.equal(changed["loss"], gradients(plain, batch(0))["loss"])


@functools.cache
def plain_losses(tied: bool) -> list[float]:
    return train(llama(tie_word_embeddings=tied, num_hidden_layers=1), 24)


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        ("fp8-current", False),
        ("fp8-delayed", False),
        ("mxfp8", False),
        ("mxfp8", True),
        ("nvfp4", False),
        ("mxfp8-fwd-nvfp4-bwd", False),
    ],
)
def test_training_lowers_the_loss_as_the_plain_model_does(name: str, tied: bool) -> None:
    """From ln 256 = 5.5 nats to less than half of it; what formats change is small against that."""
    plain = plain_losses(tied)
    model = llama(tie_word_embeddings=tied, num_hidden_layers=1)
    losses = train(duotone.convert(model, recipes.load(name)), 24)
    assert losses[0] > 5.4 and plain[-1] < 2.75
    assert abs(losses[-1] - plain[-1]) < 0.05 * (losses[0] - losses[-1])


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["nvfp4", "fp8-delayed"])
def test_gradient_checkpointing_gives_the_same_bits(name: str, reentrant: bool) -> None:
    """Stochastic rounding and delayed scales are what a recompute could get wrong."""
    plain, saving = (duotone.convert(llama(), recipes.load(name)) for _ in range(2))
    saving.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for step in range(2):
        assert_same_bits(gradients(plain, batch(step)), gradients(saving, batch(step)))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_a_saved_model_is_a_plain_one_and_converts_to_the_same_bits_again(tmp_path, name: str) -> None:
    m = duotone.convert(llama(tie_word_embeddings=True), recipes.load(name))
    train(m, 2)
    m.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(llama().state_dict()) - {"lm_head.weight"}
    reloaded, report = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()) and type(reloaded) is transformers.LlamaForCausalLM
    duotone.convert(reloaded, recipes.load(name))
    duotone.load_rng_state(reloaded, duotone.rng_state(m))
    assert_same_bits(gradients(m.train(), batch(2)), gradients(reloaded.train(), batch(2)))


def test_delayed_scales_come_back_when_the_model_is_converted_before_they_are_loaded(tmp_path) -> None:
    """save_pretrained leaves them out, since the plain model that from_pretrained fills has no place for them."""
    m = duotone.convert(llama(), recipes.load("fp8-delayed"))
    train(m, 3)
    m.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(llama().state_dict())
    save_file(m.state_dict(), tmp_path / "state.safetensors")
    reloaded = duotone.convert(llama(), recipes.load("fp8-delayed"))
    reloaded.load_state_dict(load_file(tmp_path / "state.safetensors"))
    assert_same_bits(gradients(m, batch(3)), gradients(reloaded, batch(3)))


def test_quantized_parameters_are_saved_once_they_are_plain_again(tmp_path) -> None:
    mxfp8 = recipes.load("mxfp8")
    m = duotone.convert_parameters(duotone.convert(llama(), mxfp8), mxfp8)
    expected = gradients(m, batch(0))["loss"]
    duotone.convert_parameters(m, recipes.load("bf16")).save_pretrained(tmp_path)
    reloaded = duotone.convert(transformers.LlamaForCausalLM.from_pretrained(tmp_path), mxfp8)
    assert torch.equal(gradients(reloaded.train(), batch(0))["loss"], expected)


@pytest.mark.parametrize("name", [name for name in BUILTIN if name != "bf16"])
def test_generation_with_a_cache_runs_under_every_recipe_and_begins_as_the_forward_says(name: str) -> None:
    m = duotone.convert(llama(), recipes.load(name)).eval()
    prompt = batch(0)
    first = m(input_ids=prompt).logits[:, -1].argmax(-1)
    generated = m.generate(prompt, max_new_tokens=4, do_sample=False)
    assert generated.shape == (4, 36) and torch.equal(generated[:, 32], first)


def test_it_compiles_whole_and_equals_eager() -> None:
    eager, compiled = (duotone.convert(llama(num_hidden_layers=1), recipes.load("fp8-current")) for _ in range(2))
    run = torch.compile(compiled, fullgraph=True, backend="eager")
    expected = gradients(eager, batch(0))
    loss = run(input_ids=batch(0), labels=batch(0), use_cache=False).loss
    loss.backward()
    assert_same_bits(expected, {"loss": loss.detach()} | {name: p.grad for name, p in compiled.named_parameters()})


def test_casting_a_converted_model_to_bf16_is_converting_a_bf16_model() -> None:
    after = duotone.convert(llama(), recipes.load("nvfp4")).bfloat16()
    before = duotone.convert(llama().bfloat16(), recipes.load("nvfp4"))
    assert_same_bits(gradients(after, batch(0)), gradients(before, batch(0)))
