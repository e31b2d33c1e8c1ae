"""load: exported tensors come back bit for bit, alone or in a model; other checkpoints are refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from toy import TOKENS, toy

import duotone

pytestmark = pytest.mark.filterwarnings("ignore:.* encoded from fp32")  # most models here are fp32, and never trained
SCHEMES = ["FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "MXFP8A16", "MXFP4", "MXFP4A16", "NVFP4", "NVFP4A16", "BF16"]


def export(model, path, scheme="MXFP8", **options):
    return duotone.export(model, path, scheme=scheme, calibrate=lambda: model(TOKENS), **options)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_export_of_what_was_loaded_is_the_same_file(scheme: str, tmp_path) -> None:
    model = toy()
    export(model, tmp_path / "x", scheme)
    reloaded = duotone.load(tmp_path / "x", toy())
    report = duotone.export(reloaded, tmp_path / "y", scheme=scheme, calibrate=lambda: reloaded(TOKENS))
    assert {row.source for row in report.rows} <= {"planes"}
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in "xy")
    assert first.keys() == second.keys()
    for name, value in first.items():
        if "input" not in name:
            assert torch.equal(value.reshape(-1).view(torch.uint8), second[name].reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_16x16", "nvfp4_4over6", "nvfp4_4over6_448"])
def test_amaxes_come_back_exactly(name: str, tmp_path) -> None:
    recipe = duotone.RuleRecipe(rules=(duotone.recipes.Rule(format=name),))
    model = duotone.convert(toy(), recipe)
    export(model, tmp_path / "x", "NVFP4A16")
    weight = duotone.load(tmp_path / "x")["layers.0.down_proj.weight"]
    expected = duotone.formats.get(name).encode(model.layers[0].down_proj.weight.detach())
    assert weight.formats[0].name == name
    assert all(torch.equal(part, expected[key]) for key, part in weight.planes.rowwise.parts.items())


def test_scales_of_steps_before_do_not_clip_what_is_loaded(tmp_path) -> None:
    """Delayed scales follow histories, and those of other weights are far too small here."""
    source, model = toy(), duotone.convert(toy(), "fp8-delayed")
    with torch.no_grad():
        source.layers[0].down_proj.weight.mul_(50)
    export(source, tmp_path / "x", "BF16")
    model(TOKENS).sum().backward()
    duotone.convert_parameters(model, "fp8-delayed")
    duotone.load(tmp_path / "x", model)
    loaded, value = model.layers[0].down_proj.weight.dequantize(), source.layers[0].down_proj.weight.bfloat16()
    codes = (value.float() * (448 / value.float().abs().amax())).to(torch.float8_e4m3fn).float()
    torch.testing.assert_close(loaded.float(), codes * (value.float().abs().amax() / 448), rtol=1e-5, atol=0)
    model(TOKENS).sum().backward()  # and it trains on


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("name", duotone.recipes.builtin.BUILTIN)
def test_a_converted_model_computes_the_same_after_its_weights_are_exported_and_loaded(name, is_quantized, tmp_path):
    """In the scheme that the recipe suggests. Formats with fewer scales than the scheme get theirs back."""
    model, other = (duotone.convert(toy().bfloat16(), name).eval() for _ in range(2))
    if is_quantized:
        duotone.convert_parameters(model, name)
    duotone.export(model, tmp_path / "x")
    duotone.load(tmp_path / "x", other)
    with torch.no_grad():
        torch.manual_seed(3)
        expected = model(TOKENS)
        torch.manual_seed(3)
        assert torch.equal(other(TOKENS), expected)


def test_delayed_scales_of_the_weights_before_do_not_stay(tmp_path) -> None:
    model, trained, fresh = (duotone.convert(toy().bfloat16(), "fp8-delayed") for _ in range(3))
    duotone.export(model, tmp_path / "x")
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(0.01)
    trained(TOKENS).sum().backward()
    for each in (trained, fresh):
        duotone.load(tmp_path / "x", each)
    with torch.no_grad():
        assert torch.equal(trained(TOKENS), fresh(TOKENS))


@pytest.mark.parametrize("name", ["fp8_e4m3_tensor", "mxfp8_e4m3_32x32"])
def test_scales_that_the_scheme_repeats_come_back_once(name: str, tmp_path) -> None:
    model = duotone.convert(toy(), duotone.RuleRecipe(rules=(duotone.recipes.Rule(format=name),)))
    weight = model.layers[0].down_proj.weight.detach()
    weight[3, 5] = torch.nan
    with pytest.warns(UserWarning, match="do not serve"):
        duotone.export(model, tmp_path / "x")
    loaded = duotone.load(tmp_path / "x")["layers.0.down_proj.weight"].planes.rowwise
    assert loaded.format.name == name
    for key, part in duotone.formats.get(name).encode(weight).items():
        assert torch.equal(loaded.parts[key], part), key


def test_a_loaded_model_computes_with_the_planes(tmp_path) -> None:
    model = duotone.convert(toy(), "mxfp8").eval()
    export(model, tmp_path / "x")
    with torch.device("meta"):
        empty = toy()
    duotone.convert(empty, "mxfp8").eval()
    with torch.no_grad():
        reloaded = duotone.load(tmp_path / "x", empty)
        assert all(not p.is_meta for p in reloaded.parameters())
        assert isinstance(reloaded.layers[0].q_proj.weight, duotone.QuantizedTensor)
        rounded = duotone.convert(toy().bfloat16().float(), "mxfp8").eval()
        rounded.load_state_dict(
            {n: w.dequantize() if hasattr(w, "planes") else w for n, w in reloaded.state_dict().items()}
        )
        assert torch.equal(reloaded(TOKENS), rounded(TOKENS))


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4-1d-weight", "fp8-rowwise"])
def test_a_model_of_quantized_parameters_trains_on(recipe: str, tmp_path) -> None:
    export(duotone.convert(toy(), recipe), tmp_path / "x", scheme=None)
    model = duotone.convert_parameters(duotone.convert(toy(), recipe), recipe)
    columnwise = model.layers[0].o_proj.weight.formats[1]
    duotone.load(tmp_path / "x", model)
    weight = model.layers[0].o_proj.weight
    stored = duotone.load(tmp_path / "x")["layers.0.o_proj.weight"]
    assert torch.equal(weight.rowwise_codes, stored.rowwise_codes) and weight.formats[1] == columnwise
    model(TOKENS).sum().backward()
    assert torch.isfinite(weight.grad).all() and bool(weight.grad.any())


def test_the_nominal_dtype_is_that_of_the_model(tmp_path) -> None:
    export(toy(), tmp_path / "x")
    assert duotone.load(tmp_path / "x")["layers.0.q_proj.weight"].dtype == torch.bfloat16
    assert duotone.load(tmp_path / "x", toy()).layers[0].q_proj.weight.dtype == torch.float32
    assert duotone.load(tmp_path / "x", toy().half()).embed.weight.dtype == torch.float16


def test_ties_are_loaded_once(tmp_path) -> None:
    model, other = toy(), toy()
    model.lm_head.weight, other.lm_head.weight = model.embed.weight, other.embed.weight
    with torch.no_grad():
        model.embed.weight.fill_(0.5)
    export(model, tmp_path / "x")
    duotone.load(tmp_path / "x", other)
    assert other.lm_head.weight is other.embed.weight and bool((other.embed.weight == 0.5).all())


def test_tied_weights_do_not_take_one_of_two_stored_values(tmp_path) -> None:
    model, tied = toy(), toy()
    export(model, tmp_path / "x")
    tied.lm_head.weight = tied.embed.weight
    unchanged_and_refused(tmp_path / "x", tied, r"lm_head.weight.*embed.weight; untie them in the model$")
    with torch.no_grad():
        model.lm_head.weight.copy_(model.embed.weight)
    export(model, tmp_path / "y")
    duotone.load(tmp_path / "y", tied)
    assert torch.equal(tied.lm_head.weight, model.embed.weight.bfloat16().float())


def test_a_checkpoint_without_our_notes_decodes_to_the_same_values(tmp_path) -> None:
    export(toy(), tmp_path / "x", "NVFP4A16")
    with_notes = duotone.load(tmp_path / "x")
    (tmp_path / "x" / "duotone.json").unlink()
    for name, tensor in duotone.load(tmp_path / "x").items():
        left, right = (t.dequantize(torch.bfloat16) if hasattr(t, "planes") else t for t in (tensor, with_notes[name]))
        assert torch.equal(left, right)


@pytest.mark.parametrize(
    "notes",
    [{"formats": []}, {"amaxes": {"layers.0.q_proj": "x"}}, {"amaxes": {"layers.0.q_proj": float(3).hex()}}],
)
def test_notes_of_other_files_are_refused(notes, tmp_path) -> None:
    export(toy(), tmp_path / "x", "NVFP4A16")
    file = tmp_path / "x" / "duotone.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | notes))
    unchanged_and_refused(tmp_path / "x", toy(), r"duotone.json describes layers.* wrongly; remove the file, or export")


def unchanged_and_refused(path, model, message: str) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(duotone.UserError, match=message) as raised:
        duotone.load(path, model)
    assert "\n" not in str(raised.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_checkpoints_of_other_models_are_refused_before_anything_changes(tmp_path) -> None:
    export(toy(), tmp_path / "x")
    larger = toy()
    larger.extra = nn.Linear(4, 4)
    wider = toy()
    wider.layers[0].up_proj = nn.Linear(128, 128, bias=False)
    smaller = toy()
    del smaller.layers[1]
    unchanged_and_refused(
        tmp_path / "x", larger, r"has no extra.weight; it is a checkpoint of another model, or what [^\n]*$"
    )
    unchanged_and_refused(
        tmp_path / "x",
        wider,
        r"up_proj.weight is \(256, 128\) in .* and \(128, 128\) in the model; load it into the model that was",
    )
    unchanged_and_refused(tmp_path / "x", smaller, r"has layers.1.*which the model has not")


def test_checkpoints_of_other_schemes_are_refused(tmp_path) -> None:
    export(toy(), tmp_path / "x")
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    quantization = config["quantization_config"]

    def refused(message: str, **changes) -> None:
        table = config | {"quantization_config": quantization | changes}
        (tmp_path / "x" / "config.json").write_text(json.dumps(table))
        unchanged_and_refused(tmp_path / "x", toy(), message)

    weights = quantization["config_groups"]["group_0"]["weights"]
    refused("is quantized by 'gptq'; load reads compressed-tensors", quant_method="gptq")
    refused("with one group of linears", config_groups={})
    refused("cannot be read; these can: FP8", config_groups={"g": {"weights": weights | {"num_bits": 3}}})
    refused("cannot be read; these can: FP8", config_groups={"g": None})
    refused("cannot be read; these can: FP8", config_groups={"g": {"weights": "fp8"}})
    other = {"num_bits": 8, "strategy": "channel", "group_size": None}
    group = quantization["config_groups"]["group_0"] | {"weights": weights | other}
    activations = weights | other | {"strategy": "token", "dynamic": True}
    refused("not as FP8_DYNAMIC has it", config_groups={"g": group | {"input_activations": activations}})
    export(toy(), tmp_path / "x", "BF16")
    refused("stores no weight as MXFP8, which its config.json names")


def test_half_written_exports_are_refused(tmp_path) -> None:
    export(toy(), tmp_path / "x", max_shard_bytes=100_000)
    shard = sorted((tmp_path / "x").glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    unchanged_and_refused(tmp_path / "x", toy(), r"is no whole file of safetensors .*write it again$")
    shard.unlink()
    unchanged_and_refused(tmp_path / "x", toy(), r"is absent, so .* is no whole export; export again$")
    tensors = {"other": torch.zeros(1)}
    save_file(tensors, shard)
    unchanged_and_refused(tmp_path / "x", toy(), r"lacks layers.* so it is no whole export")
    shard.write_bytes(content)
    (tmp_path / "x" / "duotone.json").write_text('{"formats": {"layers.0.q_proj": "nonsense"}}')
    unchanged_and_refused(tmp_path / "x", toy(), r"duotone.json describes layers.0.q_proj wrongly; remove the file")
    (tmp_path / "x" / "duotone.json").write_text('{"version": 2, "formats": {}}')
    unchanged_and_refused(
        tmp_path / "x", toy(), r"duotone.json is of a newer Duotone; install that, or remove the file"
    )
    (tmp_path / "x" / "config.json").unlink()
    unchanged_and_refused(tmp_path / "x", toy(), r"has no config.json, so it is no whole export")
    unchanged_and_refused(
        tmp_path / "nowhere", toy(), r"nowhere is no folder of an export; give one that duotone.export wrote$"
    )
