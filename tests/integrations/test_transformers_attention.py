"""Models of transformers with attn_implementation="duotone": their attention follows the recipe, and is in the plan."""

import dataclasses

import pytest
import torch
from causal import batch
from packages import require

import duotone
from duotone import recipes
from duotone.attention import DotProductAttention
from duotone.errors import RecipeError, UserError

transformers = require("transformers")
from duotone.integrations import transformers_attention  # noqa: E402
from duotone.integrations.transformers import DuotoneConfig  # noqa: E402

FP8 = duotone.Float8CurrentScaling(fp8_dpa=True)
HIGH = recipes.load("bf16")


def llama(implementation: str, seed: int = 0, **options):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**sizes, attn_implementation=implementation, **options)
    return transformers.LlamaForCausalLM(config)


def step(model) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = batch(0) % 128
    out = model.train()(input_ids=tokens, labels=tokens)
    out.loss.backward()
    return out.logits.detach(), model.model.layers[0].self_attn.q_proj.weight.grad


def test_a_model_that_was_not_converted_or_in_high_precision_attends_as_sdpa() -> None:
    plain = step(llama("sdpa"))
    for model in (llama("duotone"), duotone.convert(llama("duotone"), HIGH)):
        for result, expected in zip(step(model), plain, strict=True):
            assert torch.allclose(result, expected, atol=1e-5)


def test_converted_attention_follows_the_recipe_and_has_rows_in_the_plan() -> None:
    model, plain = duotone.convert(llama("duotone"), FP8), duotone.convert(llama("sdpa"), FP8)
    rows = duotone.plan(model).filter("model.layers.0.self_attn.duotone_attention")
    assert [row.gemm for row in rows][:2] == ["QK^T", "PV"] and rows[0].a == "fp8_e4m3_tensor" and len(rows) == 7
    (row,) = duotone.plan(plain).filter("model.layers.0.self_attn")
    assert "attention runs as 'sdpa'" in row.reason and "attn_implementation='duotone'" in row.reason
    for result, expected in zip(step(model), step(plain), strict=True):
        assert not torch.equal(result, expected)
        assert (result - expected).norm() < 0.15 * expected.norm()
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_the_plan_follows_the_implementation_that_is_set_now() -> None:
    """transformers calls another attention after `set_attn_implementation`: no row may tell of FP8 products then."""
    model, expected = duotone.convert(llama("duotone"), FP8), step(duotone.convert(llama("sdpa"), FP8))
    model.set_attn_implementation("sdpa")
    assert all(map(torch.equal, step(model), expected))
    (row,) = duotone.plan(model).filter("model.layers.0.self_attn")
    assert "attention runs as 'sdpa' of transformers" in row.reason
    model.set_attn_implementation("duotone")
    assert len(duotone.plan(model).filter("model.layers.0.self_attn.duotone_attention")) == 7

    late = duotone.convert(llama("sdpa"), FP8)
    late.set_attn_implementation("duotone")
    (row,) = duotone.plan(late).filter("model.layers.0.self_attn")
    assert "'duotone' was set later: call duotone.convert again" in row.reason
    duotone.convert(late, FP8)
    assert not torch.equal(step(late)[0], expected[0])


def test_a_strict_recipe_refuses_attention_that_transformers_runs_itself() -> None:
    recipe = dataclasses.replace(FP8, strict=True)
    model = llama("sdpa")
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(RecipeError, match=r"strict: model\.layers\.0\.self_attn: attention runs as 'sdpa'") as caught:
        duotone.convert(model, recipe)
    assert "\n" not in str(caught.value)
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_rules_reach_attention_by_its_name_and_revert_takes_it_away() -> None:
    rules = (duotone.recipes.Rule(module="model.layers.1.*", module_type="dpa", format="mxfp8_e4m3"),)
    model = duotone.convert(llama("duotone"), duotone.recipes.RuleRecipe(rules=rules))
    rows = [duotone.plan(model).filter(f"model.layers.{i}.self_attn.duotone_attention") for i in range(2)]
    assert [row[0].a for row in rows] == ["identity", "mxfp8_e4m3"]
    duotone.revert(model)
    assert not any(isinstance(module, DotProductAttention) for module in model.modules())


def test_padding_and_generation_run_through_the_cores() -> None:
    model = duotone.convert(llama("duotone"), FP8).eval()
    tokens = torch.arange(2 * 9).view(2, 9) + 3
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    with torch.no_grad():
        padded = model(input_ids=tokens, attention_mask=mask).logits[0, 4:]
        alone = model(input_ids=tokens[:1, 4:], position_ids=torch.arange(5)[None]).logits[0]
        moved = model(input_ids=tokens[:1, 4:], position_ids=torch.arange(4, 9)[None]).logits[0]
    assert (padded - alone).norm() < 0.2 * alone.norm() and (moved - alone).norm() < 0.2 * alone.norm()
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    generated = model.generate(tokens, attention_mask=mask, **options)
    plain = duotone.convert(llama("duotone"), HIGH).eval().generate(tokens, attention_mask=mask, **options)
    assert generated.shape == plain.shape == (2, 14)


def test_heads_of_values_may_have_a_width_of_their_own() -> None:
    """As latent attention has: DeepSeek, Kimi, GLM and others."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 8}
    config = transformers.DeepseekV3Config(**sizes, num_key_value_heads=4, first_k_dense_replace=1, vocab_size=128)
    logits = []
    for implementation, recipe in (("sdpa", None), ("duotone", HIGH), ("duotone", FP8)):
        config._attn_implementation = implementation
        torch.manual_seed(0)
        model = transformers.DeepseekV3ForCausalLM(config).eval()
        logits.append((model if recipe is None else duotone.convert(model, recipe))(input_ids=batch(0) % 128).logits)
    assert torch.allclose(logits[0], logits[1], atol=1e-5)
    assert 0 < (logits[0] - logits[2]).norm() < 0.15 * logits[0].norm()


@pytest.mark.parametrize("is_masked", [False, True])
def test_edges_of_a_collator_keep_packed_sequences_apart(is_masked) -> None:
    """Although a model with a cache, as transformers builds one by default, makes no mask of packed positions."""
    model = duotone.convert(llama("duotone"), HIGH).eval()
    tokens, edges = torch.arange(12)[None] + 3, torch.tensor([0, 5, 12], dtype=torch.int32)
    options = {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": 7, "max_length_k": 7}
    options |= {"attention_mask": torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()} if is_masked else {}
    positions = torch.cat((torch.arange(5), torch.arange(7)))[None]
    packed = model(input_ids=tokens, position_ids=positions, **options).logits
    alone = [model(input_ids=part).logits for part in tokens.split((5, 7), 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), atol=1e-5, rtol=1e-5)
    with pytest.raises(UserError, match="packed sequences are one row; got 2 rows"):
        model(input_ids=tokens.expand(2, -1), **{**options, "attention_mask": None})


def test_a_static_cache_generates_what_sdpa_does() -> None:
    """transformers gives no mask to a first forward, although the cache has room behind its keys."""
    tokens = torch.arange(9)[None] + 3
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "output_scores": True}
    options |= {"cache_implementation": "static", "return_dict_in_generate": True}
    result = duotone.convert(llama("duotone"), HIGH).eval().generate(tokens, **options)
    expected = llama("sdpa").eval().generate(tokens, **options)
    assert torch.equal(result.sequences, expected.sequences)
    assert all(torch.allclose(*scores, atol=1e-5) for scores in zip(result.scores, expected.scores, strict=True))


def test_scores_that_a_model_changes_are_refused_in_one_line() -> None:
    model = duotone.convert(llama("duotone"), FP8)
    attention = model.model.layers[0].self_attn
    heads = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 6, 16), torch.randn(1, 2, 6, 16)
    with pytest.raises(UserError, match="attention of Duotone has no softcap"):
        transformers_attention.attend(attention, *heads, None, softcap=30.0)
    with pytest.raises(UserError, match=r"a mask of transformers is bool, .* got float32"):
        transformers_attention.attend(attention, *heads, torch.zeros(1, 1, 6, 6))


@pytest.mark.parametrize("kind", ["GPT2", "OPT", "Bert"])
def test_dropout_of_attention_is_that_of_the_model(kind) -> None:
    """Which holds it as an attribute of another name, or as an `nn.Dropout`, and may change it later."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 128}
    off = {"resid_pdrop": 0, "embd_pdrop": 0, "dropout": 0, "hidden_dropout_prob": 0}
    rates = {"attn_pdrop": 0.5, "attention_dropout": 0.5, "attention_probs_dropout_prob": 0.5}
    config = getattr(transformers, f"{kind}Config")(**sizes, **off, **rates)
    model = transformers.AutoModel.from_config(config, attn_implementation="duotone")
    (core,) = [module for module in duotone.convert(model, HIGH).modules() if isinstance(module, DotProductAttention)]
    assert core.attention_dropout == 0.5
    (owner,) = [module for module in model.modules() if "duotone_attention" in module._modules]
    for name, value in {**vars(owner), **owner._modules}.items():
        if "dropout" in name:
            setattr(owner, name, torch.nn.Dropout(0.25) if isinstance(value, torch.nn.Dropout) else 0.25)
    tokens = torch.arange(24).view(2, 12)
    first, second = (model.train()(input_ids=tokens).last_hidden_state for _ in range(2))
    assert core.attention_dropout == 0.25 and not torch.equal(first, second)
    first, second = (model.eval()(input_ids=tokens).last_hidden_state for _ in range(2))
    assert core.attention_dropout == 0.25 and torch.equal(first, second)


def test_encoder_and_decoder_may_have_other_numbers_of_heads() -> None:
    sizes = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 128, "max_position_embeddings": 32}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    config, tokens, logits = transformers.BartConfig(**sizes), torch.arange(12)[None] + 3, []
    for implementation in ("eager", "duotone"):
        torch.manual_seed(0)
        model = transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation=implementation).eval()
        logits.append(duotone.convert(model, HIGH)(input_ids=tokens).logits)
    assert torch.allclose(*logits, atol=1e-5)


def test_a_model_that_attends_by_itself_is_refused_before_anything_changes() -> None:
    """Bloom adds masks to scores, and a bool mask would hide nothing."""
    config = transformers.BloomConfig(hidden_size=64, n_layer=1, n_head=4, vocab_size=128)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="duotone")
    with pytest.raises(UserError, match="BloomForCausalLM does not attend through transformers' attention interface"):
        duotone.convert(model, FP8)
    assert type(model.transformer.h[0].mlp.dense_h_to_4h) is torch.nn.Linear


def test_a_checkpoint_of_transformers_keeps_the_delayed_scales_of_attention(tmp_path) -> None:
    config = DuotoneConfig("nvfp4-linear-fp8-dpa")
    llama("sdpa").save_pretrained(tmp_path / "plain")
    options = {"quantization_config": config, "attn_implementation": "duotone", "output_loading_info": True}
    model, _ = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", **options)
    step(model)
    model.save_pretrained(tmp_path / "saved")
    again, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", **options)
    assert not any(info.values())
    model.zero_grad()
    for result, expected in zip(step(again), step(model), strict=True):
        assert torch.equal(result, expected)
