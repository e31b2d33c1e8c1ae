"""fuse on models of transformers with random weights: values, generation and checkpoints."""

import pytest
import torch
from causal import assert_same_bits, batch, gradients, llama, mixtral, train
from torch import nn

import duotone
from later import Later

transformers = Later("transformers")

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}


def fused(recipe, **changes):
    return duotone.fuse(duotone.convert(llama(**changes), recipe))


def rows(m: nn.Module) -> dict[str, str]:
    return {row.module: row.reason for row in duotone.plan(m) if "fused" in row.reason}


def worst(results, expected) -> float:
    return max(((results[n] - expected[n]).norm() / expected[n].norm()).item() for n in expected)


def test_every_layer_of_llama_is_fused() -> None:
    m = fused("mxfp8")
    for i in range(2):
        assert rows(m)[f"model.layers.{i}.input_layernorm"].endswith("of self_attn.q_proj + k_proj + v_proj")
        assert rows(m)[f"model.layers.{i}.post_attention_layernorm"].endswith("of mlp")
        assert rows(m)[f"model.layers.{i}.mlp"] == "fused: gate_proj + up_proj, swiglu and down_proj are one pipeline"
    assert len(rows(m)) == 6


@pytest.mark.parametrize(
    ("recipe", "bound"), [("mxfp8", 1e-6), ("fp8-block", 1e-4), ("bf16", 1e-6), ("fp8-current", 0.15), ("nvfp4", 0.4)]
)
def test_gradients_of_llama_are_those_of_the_unfused_model(recipe: str, bound: float) -> None:
    """Up to the order of sums where no scale crosses from one weight to the next; else within what the format loses."""
    unfused = gradients(duotone.convert(llama(), recipe), batch(0))
    assert worst(gradients(fused(recipe), batch(0)), unfused) < bound


def test_llama_trains_and_generates_in_bf16() -> None:
    losses = train(fused("fp8-current").bfloat16(), 24)
    assert losses[0] > 5.4 and losses[-1] < 2.75
    m = fused("mxfp8").bfloat16().eval()
    first = m(input_ids=batch(0)).logits[:, -1].argmax(-1)
    generated = m.generate(batch(0), max_new_tokens=4, do_sample=False)
    assert generated.shape == (4, 36) and torch.equal(generated[:, 32], first)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", ["nvfp4", "fp8-delayed"])
def test_gradient_checkpointing_gives_the_same_bits(recipe: str, reentrant: bool) -> None:
    plain, saving = fused(recipe), fused(recipe)
    saving.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for step in range(2):
        assert_same_bits(gradients(plain, batch(step)), gradients(saving, batch(step)))


def test_a_saved_model_is_the_plain_one(tmp_path) -> None:
    m = fused("mxfp8")
    m.save_pretrained(tmp_path)
    reloaded = type(m).from_pretrained(tmp_path)
    assert "Fused" not in repr(reloaded)
    expected = gradients(m, batch(0))
    assert_same_bits(gradients(duotone.fuse(duotone.convert(reloaded.train(), "mxfp8")), batch(0)), expected)


def test_revert_gives_back_classes_and_bits() -> None:
    m = fused("nvfp4")
    gradients(m, batch(0))
    duotone.revert(m)
    assert [type(part) for part in m.modules()] == [type(part) for part in llama().modules()]
    assert_same_bits(gradients(m, batch(0)), gradients(llama(), batch(0)))


MODELS = {
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            **SIZES, num_key_value_heads=1, head_dim=32, pad_token_id=0, bos_token_id=1, eos_token_id=2
        )
    ),
    "phi3": lambda: transformers.Phi3ForCausalLM(
        transformers.Phi3Config(**SIZES, num_key_value_heads=1, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=64, n_embd=64, n_layer=1, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2
        )
    ),
    "t5": lambda: transformers.T5Model(
        transformers.T5Config(
            vocab_size=64, d_model=64, d_ff=96, num_layers=1, num_heads=2, d_kv=32, feed_forward_proj="gated-gelu"
        )
    ),
    "clip": lambda: transformers.CLIPTextModel(transformers.CLIPTextConfig(**SIZES)),
    "mixtral": lambda: mixtral(num_hidden_layers=1, vocab_size=64),
}
PATTERNS = {
    "gemma3": {
        "model.layers.0.input_layernorm": "self_attn.q_proj + k_proj + v_proj",
        "model.layers.0.pre_feedforward_layernorm": "mlp",
        "model.layers.0.mlp": "gate_proj + up_proj, geglu and down_proj",
    },
    "phi3": {
        "model.layers.0.input_layernorm": "self_attn.qkv_proj",
        "model.layers.0.post_attention_layernorm": "mlp",
        "model.layers.0.mlp": "gate_up_proj, swiglu and down_proj",
    },
    "gpt2": {
        "transformer.h.0.ln_1": "attn.c_attn",
        "transformer.h.0.ln_2": "mlp",
        "transformer.h.0.mlp": "c_fc, gelu and c_proj",
    },
    "t5": {
        "encoder.block.0.layer.1.DenseReluDense": "wi_0 + wi_1, geglu and wo",
        "decoder.block.0.layer.1.layer_norm": "EncDecAttention.q",
    },
    "clip": {"encoder.layers.0.layer_norm2": "mlp", "encoder.layers.0.mlp": "fc1, qgelu and fc2"},
    "mixtral": {"model.layers.0.input_layernorm": "self_attn.q_proj + k_proj + v_proj"},
}


@pytest.mark.parametrize("name", MODELS)
def test_fused_patterns_of_other_models_keep_their_output(name: str) -> None:
    torch.manual_seed(0)
    m = duotone.convert(MODELS[name]().eval(), "mxfp8")
    tokens = torch.randint(3, 60, (2, 16))
    inputs = {"input_ids": tokens} | ({"decoder_input_ids": tokens} if name == "t5" else {})
    expected = m(**inputs)[0]
    duotone.fuse(m)
    assert torch.allclose(m(**inputs)[0], expected, rtol=1e-4, atol=1e-5)
    for module, parts in PATTERNS[name].items():
        assert rows(m)[module].removesuffix(" are one pipeline").endswith(parts)
