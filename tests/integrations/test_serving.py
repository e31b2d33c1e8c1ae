"""Exports are what compressed-tensors describes, and load in transformers with equal weights."""

import json
import warnings

import pytest
import torch
from causal import batch, llama, mixtral
from packages import require
from safetensors.torch import load_file

import duotone
from duotone.serving.schemes import SCHEMES

transformers = require("transformers")
require("compressed-tensors")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
FP32_SCALES = ("FP8", "FP8_DYNAMIC", "FP8_BLOCK")
"""Their scales are fp32. transformers rounds them to the dtype of a model that it leaves compressed."""


@pytest.mark.parametrize("name", SCHEMES)
def test_a_group_is_the_preset_of_that_name(name: str) -> None:
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme

    group = QuantizationScheme.model_validate(SCHEMES[name].group())
    preset = preset_name_to_scheme(name, ["Linear"])
    for side in ("weights", "input_activations"):
        scheme, expected = (getattr(one, side) and getattr(one, side).model_dump() for one in (group, preset))
        assert scheme == expected


def exported(path, scheme: str, **options):
    model = llama(hidden_size=128, intermediate_size=256).eval()
    duotone.export(model, path, scheme=scheme, calibrate=lambda: model(batch(0)), **options)
    return duotone.load(path)


def set_dequantize(path, dequantize: bool) -> None:
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["dequantize"] = dequantize
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dequantize", [True, False], ids=["dequantized", "compressed"])
def test_transformers_decodes_to_equal_weights(scheme: str, dequantize: bool, tmp_path) -> None:
    exports = exported(tmp_path, scheme, max_shard_bytes=200_000)
    set_dequantize(tmp_path, dequantize)
    dtype = torch.float32 if scheme in FP32_SCALES and not dequantize else torch.bfloat16
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, output_loading_info=True)
    activations = {name for name in info["unexpected_keys"] if "input" in name}
    assert not info["missing_keys"] and info["unexpected_keys"] == activations
    assert bool(activations) == (dequantize and bool(SCHEMES[scheme].input_scale))
    with torch.no_grad():
        logits = model(batch(0)).logits  # decompresses the weights
    assert torch.isfinite(logits).all()
    parameters = {name: p for name, p in model.named_parameters() if name in exports}
    assert parameters.keys() == exports.keys()
    for name, weight in parameters.items():
        values = exports[name].dequantize(dtype) if hasattr(exports[name], "planes") else exports[name].to(dtype)
        assert torch.equal(weight.to(dtype), values), name


@pytest.mark.parametrize("name", ["nvfp4_16x16", "nvfp4_4over6", "nvfp4_4over6_448", "mxfp8_e4m3_32x32"])
def test_planes_of_training_decode_to_equal_weights(name: str, tmp_path) -> None:
    recipe = duotone.RuleRecipe(rules=(duotone.recipes.Rule(format=name),))
    model = duotone.convert(llama(hidden_size=128, intermediate_size=256), recipe)
    duotone.export(model, tmp_path)
    set_dequantize(tmp_path, True)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    weight = model.model.layers[1].mlp.down_proj.weight.detach()
    quantized = duotone.Quantizer(duotone.formats.get(name), None).quantize(weight)
    assert torch.equal(plain.model.layers[1].mlp.down_proj.weight, quantized.dequantize(torch.bfloat16))


def test_bf16_loads_as_a_plain_model(tmp_path) -> None:
    exports = exported(tmp_path, "BF16")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert not any(info.values()) and model.dtype == torch.bfloat16
    assert all(torch.equal(p, exports[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "MXFP8", "NVFP4A16"])
def test_we_read_what_compressed_tensors_compresses(scheme: str, tmp_path) -> None:
    exported(tmp_path / "x", scheme)
    set_dequantize(tmp_path / "x", False)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "x", dtype=torch.float32)
    model.save_pretrained(tmp_path / "y")
    exports, compressed = duotone.load(tmp_path / "x"), duotone.load(tmp_path / "y")
    for name in exports.keys() & compressed.keys():
        if hasattr(exports[name], "planes"):
            assert torch.equal(exports[name].dequantize(torch.bfloat16), compressed[name].dequantize(torch.bfloat16)), (
                name
            )


@pytest.mark.filterwarnings("ignore")
def test_what_a_multimodal_model_keeps_in_bf16_is_plain_for_transformers_too(tmp_path) -> None:
    """Published checkpoints have other names than its modules, and transformers looks for names of modules."""
    from duotone.integrations.transformers import export

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = transformers.LlamaConfig(**sizes, vocab_size=96)
    vision = transformers.CLIPVisionConfig(**sizes, image_size=32, patch_size=16)
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=95)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    export(model, tmp_path, scheme="FP8_DYNAMIC")
    back, info = transformers.LlavaForConditionalGeneration.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    head = model.lm_head.weight.bfloat16().float()
    assert torch.equal(back.lm_head.weight, head)
    ids = torch.arange(32)[None]
    with torch.no_grad():
        expected, result = (each(input_ids=ids).logits for each in (model, back))
    assert (result - expected).norm() < 0.2 * expected.norm()


MOE = {"hidden_size": 128, "intermediate_size": 128, "num_local_experts": 4}


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "NVFP4A16", "BF16"])
@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_experts_are_stored_as_linears_under_the_names_of_published_checkpoints(scheme, recipe, tmp_path) -> None:
    from duotone.integrations.transformers import export

    model = mixtral(**MOE)
    if recipe is not None:
        duotone.convert(model, recipe)
    report = export(model, tmp_path, scheme=scheme)
    stored = duotone.load(tmp_path)
    mixtral(**MOE).save_pretrained(tmp_path / "published")
    published = load_file(tmp_path / "published" / "model.safetensors")
    assert stored.keys() == published.keys()
    for name, tensor in stored.items():
        values = tensor.dequantize(torch.float32) if hasattr(tensor, "planes") else tensor.float()
        assert torch.linalg.vector_norm(values - published[name]) <= 0.12 * torch.linalg.vector_norm(published[name])
    config = json.loads((tmp_path / "config.json").read_text())
    if scheme != "BF16":
        assert len(report.rows) == 2 * (4 + 3 * 4)
        routers = [f"model.layers.{layer}.{block}.gate" for block in ("block_sparse_moe", "mlp") for layer in range(2)]
        assert config["quantization_config"]["ignore"] == ["lm_head", *routers]  # by names of servers, then of modules
    if scheme == "NVFP4A16":
        place = "model.layers.0.block_sparse_moe.experts.1"
        one, three = (stored[f"{place}.{name}.weight"].planes.rowwise.parts["amax"] for name in ("w1", "w3"))
        assert torch.equal(one, three)


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "BF16"])
def test_transformers_loads_experts_with_equal_weights(scheme: str, tmp_path) -> None:
    from duotone.integrations.transformers import export

    export(mixtral(**MOE), tmp_path, scheme=scheme)
    if scheme != "BF16":
        set_dequantize(tmp_path, True)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(info.values())
    stored = duotone.load(tmp_path)
    experts = model.model.layers[0].mlp.experts
    for at in range(4):
        place = f"model.layers.0.block_sparse_moe.experts.{at}"
        parts = [stored[f"{place}.{name}.weight"] for name in ("w1", "w3", "w2")]
        values = [part.dequantize(torch.bfloat16) if hasattr(part, "planes") else part for part in parts]
        assert torch.equal(experts.gate_up_proj[at], torch.cat(values[:2])) and torch.equal(
            experts.down_proj[at], values[2]
        )


@pytest.mark.parametrize("scheme", ["FP8_BLOCK", "MXFP8", "NVFP4A16", "BF16"])
def test_experts_come_back_from_the_names_of_published_checkpoints(scheme: str, tmp_path) -> None:
    """transformers decodes experts of these schemes wrongly."""
    from duotone.integrations.transformers import export, load

    model = mixtral(**MOE)
    export(model, tmp_path, scheme=scheme)
    other = mixtral(**MOE)
    for parameter in other.parameters():
        torch.nn.init.zeros_(parameter)
    with pytest.raises(duotone.UserError, match=r"^[^\n]*: load of that module reads it$"):
        duotone.load(tmp_path, other)
    stored, loaded = duotone.load(tmp_path), load(tmp_path, other)
    for layer in range(2):
        place, experts = f"model.layers.{layer}.block_sparse_moe", loaded.model.layers[layer].mlp.experts
        assert torch.equal(loaded.model.layers[layer].mlp.gate.weight.bfloat16(), stored[f"{place}.gate.weight"])
        for at in range(4):
            parts = [stored[f"{place}.experts.{at}.{name}.weight"] for name in ("w1", "w3", "w2")]
            values = [part.dequantize(torch.float32) if hasattr(part, "planes") else part.float() for part in parts]
            assert torch.equal(experts.gate_up_proj[at], torch.cat(values[:2]))
            assert torch.equal(experts.down_proj[at], values[2])
    error = (loaded(batch(0)).logits - model(batch(0)).logits).norm() / model(batch(0)).logits.norm()
    assert error < 0.3  # of two layers in four bits


def test_projections_that_servers_fuse_in_two_schemes_are_a_warning(tmp_path) -> None:
    with pytest.warns(
        UserWarning, match=r"k_proj and model.layers.0.self_attn.q_proj would be stored quantized and mod"
    ):
        duotone.export(llama(), tmp_path, scheme="FP8_DYNAMIC", ignore=["*.v_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        duotone.export(llama(), tmp_path, scheme="FP8_DYNAMIC", ignore=["*.[qkv]_proj"], dtype=torch.float32)


def test_all_modules_that_servers_do_not_read_are_named_at_once(tmp_path) -> None:
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 96}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    with pytest.raises(duotone.UserError, match=r"Conv1D\) and 7 others hold what no server reads .*ignore=\["):
        duotone.export(model, tmp_path, scheme="MXFP8")
    with pytest.raises(duotone.UserError, match="no linear would be stored"):
        duotone.export(model, tmp_path, scheme="MXFP8", ignore=["*.c_attn", "*.c_fc", "*.c_proj"])


def test_a_model_in_fp16_says_so(tmp_path) -> None:
    duotone.export(llama().half(), tmp_path, scheme="BF16")
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float16"
    assert {tensor.dtype for tensor in duotone.load(tmp_path).values()} == {torch.float16}
