"""Models of transformers convert, train a step, generate, and come back from save_pretrained."""

import pytest
import torch
from causal import SIZES, batch
from packages import require

import duotone

transformers = require("transformers")
HEADS = {"head_dim": 32, "tie_word_embeddings": False}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
SPEECH = {
    "vocab_size": 256, "num_mel_bins": 16, "d_model": 64, "max_source_positions": 16, "max_target_positions": 64,
    "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64,
    "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3,
    "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
MODELS = {
    "Qwen3ForCausalLM": SIZES | HEADS,
    "Qwen3MoeForCausalLM": SIZES | HEADS | EXPERTS | {"num_experts": 4},
    "GptOssForCausalLM": SIZES | HEADS | EXPERTS | {"num_local_experts": 4},
    "WhisperForConditionalGeneration": SPEECH,
}

WITH_EXPERTS = ("Qwen3MoeForCausalLM", "GptOssForCausalLM")


@pytest.mark.parametrize("name", MODELS)
def test_a_model_converts_trains_generates_and_is_saved(name: str, tmp_path) -> None:
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**MODELS[name] | {"num_hidden_layers": 1}))
    speech = {"input_features": torch.randn(4, 16, 32)} if model.config.is_encoder_decoder else {}
    inputs = speech or {"input_ids": batch(0)}
    plain = model(**inputs, labels=batch(0)).logits
    duotone.convert(model, "mxfp8")
    linears = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m.out_features != 256}
    rows = {row.module for row in duotone.plan(model) if row.a == "mxfp8_e4m3"}
    assert linears <= rows and any("experts" in n for n in rows) == (name in WITH_EXPERTS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    output = model(**inputs, labels=batch(0))
    assert 0 < (output.logits - plain).norm() < 0.2 * plain.norm()
    output.loss.backward()
    assert not [n for n in linears if model.get_submodule(n).weight.grad is None]
    optimizer.step()
    assert model(**inputs, labels=batch(0)).loss < output.loss
    model.eval()
    prompt = {name: tensor[:, :8] if name == "input_ids" else tensor for name, tensor in inputs.items()}
    tokens = model.generate(**prompt, max_new_tokens=3, do_sample=False)
    model.save_pretrained(tmp_path)
    again, info = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    duotone.convert(again, "mxfp8")
    assert torch.equal(again.generate(**prompt, max_new_tokens=3, do_sample=False), tokens)
