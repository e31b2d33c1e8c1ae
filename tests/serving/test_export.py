"""export: names, bits and configs of what servers read, without their packages; and what is refused."""

import hashlib
import json
import math
import os
import warnings

import pytest
import torch
from causal import mixtral
from safetensors.torch import load_file
from torch import nn
from toy import TOKENS, toy

import duotone
from duotone import formats
from duotone.dispatch import stages
from duotone.serving import exported_weight, exporting, folder, schemes, tensor_file
from duotone.serving.tensor_file import write_tensors
from duotone_lab.memory.storages import LiveStorages, total_bytes

pytestmark = pytest.mark.filterwarnings("ignore:.* encoded from fp32")  # most models here are fp32, and never trained
SCHEMES = {
    "FP8": "fp8_e4m3_tensor",
    "FP8_DYNAMIC": "fp8_e4m3_row",
    "FP8_BLOCK": "fp8_e4m3_128x128_fp32",
    "MXFP8": "mxfp8_e4m3",
    "MXFP4": "mxfp4",
    "NVFP4": "nvfp4",
}
DOWN = "layers.0.down_proj"


def export(model, path, scheme=None, **options):
    return duotone.export(model, path, scheme=scheme, calibrate=lambda: model(TOKENS), **options)


def quantized_model(recipe: str, fmt: str = ""):
    """A converted model whose linears hold planes."""
    rules = (duotone.recipes.Rule(format=fmt),) if fmt else ()
    chosen = duotone.RuleRecipe(rules=rules) if fmt else duotone.recipes.load(recipe)
    return duotone.convert_parameters(duotone.convert(toy(), chosen), chosen)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_and_scales_are_those_of_the_format(scheme: str, tmp_path) -> None:
    model = toy()
    export(model, tmp_path / "x", scheme)
    saved = load_file(tmp_path / "x" / "model.safetensors")
    weight = model.get_submodule(DOWN).weight.detach()
    parts = formats.get(SCHEMES[scheme]).encode(weight)
    packed = scheme in ("MXFP4", "NVFP4")
    codes = saved[f"{DOWN}.weight_packed" if packed else f"{DOWN}.weight"]
    assert codes.dtype == (torch.uint8 if packed else torch.float8_e4m3fn)
    assert torch.equal(codes.view(torch.uint8), parts["codes"])
    scale = saved[f"{DOWN}.weight_scale"]
    assert torch.equal(scale.view(parts["scale"].dtype), parts["scale"])
    shapes = {"FP8": (1,), "FP8_DYNAMIC": (128, 1), "FP8_BLOCK": (1, 2), "MXFP8": (128, 8), "MXFP4": (128, 8)}
    assert scale.shape == shapes.get(scheme, (128, 16))


def test_nvfp4_stores_global_scales_of_weights_and_activations(tmp_path) -> None:
    model = toy()
    export(model, tmp_path / "x", "NVFP4")
    saved = load_file(tmp_path / "x" / "model.safetensors")
    seen = []
    with torch.no_grad():
        handle = model.get_submodule(DOWN).register_forward_pre_hook(lambda _, x: seen.append(x[0].abs().max()))
        model(TOKENS)
        handle.remove()
    amax = model.get_submodule(DOWN).weight.detach().abs().max()
    assert torch.equal(saved[f"{DOWN}.weight_global_scale"], (torch.tensor(2688.0) / amax).reshape(1))
    assert torch.equal(saved[f"{DOWN}.input_global_scale"], (torch.tensor(2688.0) / seen[0]).reshape(1))
    export(model, tmp_path / "y", "NVFP4A16")
    assert f"{DOWN}.input_global_scale" not in load_file(tmp_path / "y" / "model.safetensors")


def test_fp8_stores_the_scale_of_activations(tmp_path) -> None:
    model = toy()
    export(model, tmp_path / "x", "FP8")
    saved = load_file(tmp_path / "x" / "model.safetensors")
    normed = model.layers[0].norm(model.embed(TOKENS)).detach()
    assert torch.equal(saved["layers.0.q_proj.input_scale"], (normed.abs().max() / 448).reshape(1))


def test_the_scale_of_activations_is_that_of_the_largest_batch(tmp_path) -> None:
    model, batches = toy(), [TOKENS, TOKENS + 16]
    normed = [model.layers[0].norm(model.embed(batch)).detach().abs().max() for batch in batches]
    assert normed[0] != normed[1]
    for order in (batches, batches[::-1]):
        duotone.export(model, tmp_path / "x", scheme="FP8", calibrate=lambda order=order: [model(x) for x in order])
        saved = load_file(tmp_path / "x" / "model.safetensors")
        assert torch.equal(saved["layers.0.q_proj.input_scale"], (max(normed) / 448).reshape(1))


class ByKeyword(nn.Module):
    """A linear that is called by keyword, as generated code does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(input=x)


def test_the_scale_is_that_of_what_the_product_reads(tmp_path) -> None:
    """Behind the norm of a LayerNormLinear, and of an input that has a name."""
    x = 100 * torch.randn(16, 64)
    normed_linear = duotone.LayerNormLinear(64, 64, normalization="RMSNorm", recipe=duotone.recipes.load("fp8-current"))
    model = nn.Sequential(normed_linear, ByKeyword())
    duotone.export(model, tmp_path / "x", scheme="FP8", calibrate=lambda: model(x))
    saved = load_file(tmp_path / "x" / "model.safetensors")
    normed = torch.nn.functional.rms_norm(x, (64,), eps=1e-5).abs().max()
    torch.testing.assert_close(saved["0.input_scale"], (normed / 448).reshape(1))
    assert torch.equal(saved["1.linear.input_scale"], (model[0](x).detach().abs().max() / 448).reshape(1))


@pytest.mark.parametrize(
    ("fmt", "scheme"),
    [
        ("fp8_e4m3_tensor", "FP8"),
        ("fp8_e4m3_tensor_pow2", "FP8_DYNAMIC"),
        ("fp8_e4m3_row", "FP8_DYNAMIC"),
        ("fp8_e4m3_128x128", "FP8_BLOCK"),
        ("fp8_e4m3_tensor", "FP8_BLOCK"),
        ("mxfp8_e4m3", "MXFP8"),
        ("mxfp8_e4m3_32x32", "MXFP8"),
        ("mxfp4", "MXFP4"),
    ],
)
def test_planes_are_written_without_a_second_rounding(fmt: str, scheme: str, tmp_path, monkeypatch) -> None:
    model = quantized_model("", fmt)
    monkeypatch.setattr(exported_weight, "stages_for", None)  # nothing may be encoded
    report = export(model, tmp_path / "x", scheme)
    assert {(row.source, row.error) for row in report.rows} == {("planes", 0.0)} and len(report.rows) == 14
    tensors = duotone.load(tmp_path / "x")
    for name, weight in model.named_parameters():
        values = weight.dequantize() if isinstance(weight, duotone.QuantizedTensor) else weight.bfloat16()
        stored = tensors[name]
        assert torch.equal(stored.dequantize(torch.float32) if hasattr(stored, "planes") else stored, values), name


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4"])
def test_without_a_scheme_the_recipe_decides_and_codes_are_those_that_training_multiplied(recipe, tmp_path) -> None:
    model = duotone.convert(toy(), recipe)
    report = duotone.export(model, tmp_path / "x")
    schemes = {"fp8-block": "FP8_BLOCK", "mxfp8": "MXFP8", "nvfp4": "NVFP4A16"}
    assert report.scheme == schemes.get(recipe, "FP8_DYNAMIC")
    if recipe != "fp8-delayed":
        layer = model.get_submodule(DOWN)
        quantizer = layer.plans.plan(layer.recipe).weight.quantizer
        values = quantizer.quantize(layer.weight.detach()).dequantize(torch.float32)
        stored = duotone.load(tmp_path / "x")[f"{DOWN}.weight"].dequantize(torch.float32)
        assert torch.equal(stored, values) or recipe == "fp8-current"
    assert all(0 < row.error < 0.2 for row in report.rows)


def test_fused_linears_share_one_global_scale_from_high_precision(tmp_path) -> None:
    model = toy()
    export(model, tmp_path / "x", "NVFP4A16")
    saved = load_file(tmp_path / "x" / "model.safetensors")
    for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        linears = [model.layers[1].get_submodule(name) for name in names]
        amax = max(linear.weight.abs().max() for linear in linears).detach()
        assert {saved[f"layers.1.{name}.weight_global_scale"].item() for name in names} == {
            (torch.tensor(2688.0) / amax).item()
        }
        for name, linear in zip(names, linears, strict=True):
            parts = formats.get("nvfp4").encode(linear.weight.detach(), amax=amax.reshape(1))
            assert torch.equal(saved[f"layers.1.{name}.weight_packed"], parts["codes"])


def test_a_wrapped_model_is_stored_under_its_own_names(tmp_path) -> None:
    """Servers know no `_orig_mod` and no `module`, and would leave the weights at random."""
    model = toy()
    average = torch.optim.swa_utils.AveragedModel(nn.DataParallel(model))
    models = {"x": model, "y": torch.compile(model), "z": nn.DataParallel(model), "average": average}
    for name, wrapped in models.items():
        export(wrapped, tmp_path / name, "MXFP8")
        files = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("x", name)]
        configs = [(tmp_path / folder / "config.json").read_text() for folder in ("x", name)]
        assert files[0] == files[1] and configs[0] == configs[1]


FUSED = ["q_a_proj kv_a_proj_with_mqa", "in_proj_qkv in_proj_z", "in_proj_b in_proj_a", "to_q to_k to_v"]


@pytest.mark.parametrize("pair", FUSED)
def test_projections_that_servers_multiply_as_one_matrix_share_a_global_scale(pair: str, tmp_path) -> None:
    """Of DeepSeek, and of the linear attention of Qwen 3.5: as the tables of vLLM and SGLang have them."""
    names = pair.split()
    model = nn.ModuleDict({"attention": nn.ModuleDict({name: nn.Linear(64, 64, bias=False) for name in names})})
    with torch.no_grad():
        model["attention"][names[0]].weight.mul_(3)
    duotone.export(model, tmp_path / "x", scheme="NVFP4A16")
    saved = load_file(tmp_path / "x" / "model.safetensors")
    assert len({saved[f"attention.{name}.weight_global_scale"].item() for name in names}) == 1


def test_planes_of_fused_linears_are_refused_encoded_from_masters_or_encoded_twice(tmp_path) -> None:
    model = quantized_model("nvfp4-1d-weight")
    with pytest.raises(duotone.UserError, match=r"^layers.0.q_proj shares its global scale .* masters= [^\n]*$"):
        export(model, tmp_path / "x", "NVFP4A16")
    assert not (tmp_path / "x").exists()
    report = export(model, tmp_path / "x", "NVFP4A16", allow_requantize=True)
    sources = {row.weight.rpartition(".")[2]: (row.source, row.error) for row in report.rows}
    assert sources["down_proj"] == ("planes", 0.0) and sources["o_proj"] == ("planes", 0.0)
    assert sources["q_proj"][0] == "re-encoded" and "re-encoded" in str(report)
    masters = {f"{name}.weight": module.weight for name, module in toy().named_modules() if "_proj" in name}
    exact = export(model, tmp_path / "y", "NVFP4A16", masters=masters)
    assert {row.source for row in exact.rows} == {"planes", "encoded"}
    plain = export(toy(), tmp_path / "z", "NVFP4A16")
    fresh, same = (load_file(tmp_path / name / "model.safetensors") for name in "zy")
    assert all(torch.equal(fresh[key].view(torch.uint8), same[key].view(torch.uint8)) for key in fresh if "q_pr" in key)
    assert plain.scheme == exact.scheme


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_has_an_error_and_a_warning(value: float, tmp_path) -> None:
    """FP4 has no NaN and no infinity, so the stored values are finite."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with torch.no_grad():
        model[0].weight[0, 0] = value
    duotone.convert(model, "mxfp8", rules=())
    with pytest.warns(UserWarning, match=r"^0 holds NaN, infinities .* do not serve"):
        first, second = duotone.export(model, tmp_path, scheme="MXFP4").rows
    assert math.isnan(first.error) and 0 < second.error < 0.2


@pytest.mark.parametrize("scheme", ["BF16", "MXFP8"])
@pytest.mark.parametrize("at", [0, 2], ids=["embedding", "norm"])
def test_what_stays_in_high_precision_has_the_warning_too(at: int, scheme: str, tmp_path) -> None:
    """3.4e38 is finite in fp32 and infinite in bf16. A mask may hold infinities."""
    model = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 64), nn.LayerNorm(64))
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    model.codes = nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False)
    duotone.convert(model, "mxfp8", rules=())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        duotone.export(model, tmp_path, scheme=scheme, dtype=torch.float32)
    with torch.no_grad():
        model[at].weight.view(-1)[0] = 3.4e38
    with pytest.warns(UserWarning, match=rf"^{at}.weight holds NaN, infinities .* do not serve"):
        duotone.export(model, tmp_path, scheme=scheme)


def test_one_error_names_all_shapes_that_a_scheme_does_not_have(tmp_path) -> None:
    layers = [nn.ModuleDict({"a": nn.Linear(40, 64), "b": nn.Linear(64, 64), "c": nn.Linear(64, 64)}) for _ in range(3)]
    layers[0]["c"] = nn.Linear(40, 64)
    model = nn.ModuleDict({"layers": nn.ModuleList(layers)})
    text = r"^layers.0.a cannot be .*, and 3 others are alike; ignore=\['\*\.a', 'layers.0.c'\]$"
    with pytest.raises(duotone.UserError, match=text):
        duotone.export(model, tmp_path, scheme="MXFP8")
    duotone.export(model, tmp_path, scheme="MXFP8", ignore=["*.a", "layers.0.c"])


def test_planes_of_another_format_are_encoded_again_only_if_allowed(tmp_path) -> None:
    model = quantized_model("mxfp8")
    with pytest.raises(duotone.UserError, match=r"allow_requantize=True, which rounds a second time$"):
        export(model, tmp_path / "x", "FP8_DYNAMIC")
    report = export(model, tmp_path / "x", "FP8_DYNAMIC", allow_requantize=True)
    assert {row.source for row in report.rows} == {"re-encoded"} and all(row.error < 0.05 for row in report.rows)


def test_heads_rules_and_ignored_linears_are_bf16_and_listed(tmp_path) -> None:
    rule = duotone.recipes.Rule(module="layers.1.*", format="identity")
    model = duotone.convert(toy(), "mxfp8", rules=[rule])
    report = export(model, tmp_path / "x", ignore=("*.down_proj",))
    saved = load_file(tmp_path / "x" / "model.safetensors")
    config = json.loads((tmp_path / "x" / "config.json").read_text())["quantization_config"]
    quantized = {row.weight for row in report.rows}
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert set(config["ignore"]) == linears - quantized and "lm_head" in config["ignore"] and len(quantized) == 6
    for name in config["ignore"]:
        assert torch.equal(saved[f"{name}.weight"], model.get_submodule(name).weight.bfloat16())
    assert saved["step"].dtype == torch.int64 and saved["layers.0.o_proj.bias"].dtype == torch.bfloat16
    assert not [name for name in saved if "duotone" in name]


@pytest.mark.parametrize("convert", [False, True])
def test_what_servers_do_not_read_as_linears_is_refused_unless_ignored(convert: bool, tmp_path) -> None:
    model = mixtral()
    if convert:
        duotone.convert(model, "mxfp8")
    with pytest.raises(duotone.UserError, match=r"experts.* holds what no server reads [^\n]*; ignore=[^\n]*$"):
        duotone.export(model, tmp_path / "x", scheme="FP8_DYNAMIC")
    report = duotone.export(model, tmp_path / "x", scheme="FP8_DYNAMIC", ignore=["*experts*"])
    saved = load_file(tmp_path / "x" / "model.safetensors")
    assert len(report.rows) == 8 and saved["model.layers.0.mlp.experts.down_proj"].dtype == torch.bfloat16
    grouped = duotone.convert(nn.Sequential(duotone.GroupedLinear(2, 32, 32)), "mxfp8")
    with pytest.raises(duotone.UserError, match=r"^0 \(GroupedLinear\) holds what no server reads"):
        duotone.export(grouped, tmp_path / "y", scheme="MXFP8")


def test_delayed_states_stay_out_and_ties_are_stored_once(tmp_path) -> None:
    model = duotone.convert(toy(), "fp8-delayed")
    model.lm_head.weight = model.embed.weight
    model(TOKENS).sum().backward()
    export(model, tmp_path / "x", "FP8")
    saved = load_file(tmp_path / "x" / "model.safetensors")
    assert not [name for name in saved if "duotone" in name] and "lm_head.weight" not in saved
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head"]


@pytest.mark.parametrize("head_first", [False, True])
def test_a_quantized_linear_tied_to_an_embedding_is_a_head(head_first: bool, tmp_path) -> None:
    """Files hold it once, under one of its names, and readers would look for codes under the other one."""
    names = ["head", "embed"] if head_first else ["embed", "head"]
    parts = {"embed": nn.Embedding(96, 64), "head": nn.Linear(64, 96, bias=False), "body": nn.Linear(64, 64)}
    model = nn.ModuleDict({name: parts[name] for name in [*names, "body"]})
    model["head"].weight = model["embed"].weight
    duotone.convert(model, "mxfp8", rules=())
    report = duotone.export(model, tmp_path / "x")
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert [row.weight for row in report.rows] == ["body"] and config["quantization_config"]["ignore"] == ["head"]
    saved = load_file(tmp_path / "x" / "model.safetensors")
    assert (
        torch.equal(saved[f"{names[0]}.weight"], model["embed"].weight.bfloat16()) and f"{names[1]}.weight" not in saved
    )


def test_a_linear_tied_to_one_that_stays_in_bf16_is_refused(tmp_path) -> None:
    model = nn.ModuleDict({"one": nn.Linear(64, 64), "other": nn.Linear(64, 64)})
    model["other"].weight = model["one"].weight
    message = r"^other\.weight is tied to one\.weight, which stays in bf16; ignore=\['other'\] stores both so"
    with pytest.raises(duotone.UserError, match=message):
        duotone.export(model, tmp_path / "x", scheme="MXFP8", ignore=["one"])
    assert not (tmp_path / "x").exists()


def test_heads_are_bf16_where_the_recipe_covers_them_too(tmp_path) -> None:
    model = duotone.convert(toy(), "mxfp8", rules=())
    assert "lm_head" not in [row.weight for row in export(model, tmp_path / "x").rows]
    saved = load_file(tmp_path / "x" / "model.safetensors")
    assert torch.equal(saved["lm_head.weight"], model.lm_head.weight.bfloat16())


@pytest.mark.parametrize("glob", ["layers.0", "layers.[0]"])
def test_ignore_takes_modules_that_contain_linears(glob: str, tmp_path) -> None:
    rows = export(toy(), tmp_path / "x", "MXFP8", ignore=[glob]).rows
    assert {row.weight.rpartition(".")[0] for row in rows} == {"layers.1"}
    assert load_file(tmp_path / "x" / "model.safetensors")[f"{DOWN}.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("holds_planes", [False, True])
def test_fused_linears_share_a_global_scale_where_their_formats_have_other_limits(holds_planes: bool, tmp_path) -> None:
    """2688 / amax, or 1536 / amax for 4-over-6. Planes with equal amaxes have other global scales then."""
    table = {"module": "*.k_proj", "tensor_type": "weight", "format": "nvfp4_4over6"}
    recipe = duotone.recipes.from_dict({"name": "mixed", "base": "nvfp4", "rules": [table]})
    model = toy()
    for block in model.layers:
        for linear in (block.q_proj, block.k_proj, block.v_proj):
            with torch.no_grad():
                linear.weight[0, 0] = 0.5
    duotone.convert(model, recipe)
    if holds_planes:
        duotone.convert_parameters(model, recipe)
    report = export(model, tmp_path / "x", "NVFP4A16", allow_requantize=True)
    saved = load_file(tmp_path / "x" / "model.safetensors")
    scales = [saved[f"layers.0.{name}_proj.weight_global_scale"].item() for name in "qkv"]
    assert scales == [2688 / 0.5] * 3
    assert {row.format for row in report.rows if "_proj" in row.weight and row.weight[-6] in "qkv"} == {"nvfp4"}


def test_weights_that_hold_planes_decide_the_scheme_of_plain_modules_too(tmp_path) -> None:
    export(toy(), tmp_path / "x", "MXFP8")
    plain = duotone.load(tmp_path / "x", toy())
    report = duotone.export(plain, tmp_path / "y")
    assert report.scheme == "MXFP8" and {row.source for row in report.rows} == {"planes"}
    assert (
        load_file(tmp_path / "x" / "model.safetensors").keys() == load_file(tmp_path / "y" / "model.safetensors").keys()
    )


def test_buffers_of_any_dtype_that_safetensors_has_are_stored(tmp_path) -> None:
    model = toy()
    model.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(4.0)))
    model.register_buffer("counts", torch.arange(4).to(torch.uint16))
    export(model, tmp_path / "x", "MXFP8")
    saved = load_file(tmp_path / "x" / "model.safetensors")
    assert torch.equal(saved["turns"], model.turns) and torch.equal(saved["counts"], model.counts)
    model.register_buffer("fine", model.turns.to(torch.complex128))
    with pytest.raises(duotone.UserError, match=r"^fine is torch\.complex128, which safetensors does not store"):
        export(model, tmp_path / "y", "MXFP8")
    assert not (tmp_path / "y").exists()


def test_a_path_through_a_file_is_one_line(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(duotone.UserError, match=r"file/x lies in .*/file, which is a file; give another folder"):
        export(toy(), tmp_path / "file" / "x", "MXFP8")


def test_a_model_in_fp16_stays_one(tmp_path) -> None:
    model = duotone.convert(toy().half(), "mxfp8")
    duotone.export(model, tmp_path / "x")
    assert json.loads((tmp_path / "x" / "config.json").read_text())["dtype"] == "float16"
    assert torch.equal(load_file(tmp_path / "x" / "model.safetensors")["lm_head.weight"], model.lm_head.weight)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ("MXFP6", r"scheme 'MXFP6' cannot be served; the nearest is MXFP8, "),
        ("fp8-dynamik", r"the nearest is FP8_DYNAMIC"),
        ("INT4", r"the nearest is \w+, and all are FP8, FP8_DYNAMIC"),
    ],
)
def test_unknown_schemes_name_the_nearest(scheme: str, message: str, tmp_path) -> None:
    with pytest.raises(duotone.UserError, match=message):
        export(toy(), tmp_path / "x", scheme)


@pytest.mark.parametrize(
    ("fmt", "near"),
    [
        ("mxfp6_e2m3", "MXFP8"),
        ("fp8_e5m2_row", "FP8_DYNAMIC"),
        ("fp8_e4m3_1x128", "FP8_BLOCK"),
        ("nvfp4_row", "NVFP4A16"),
    ],
)
def test_formats_that_no_server_reads_name_the_nearest(fmt: str, near: str, tmp_path) -> None:
    with pytest.raises(duotone.UserError, match=rf"^no server reads weights in {fmt}; the nearest scheme is {near}: "):
        export(quantized_model("", fmt), tmp_path / "x")


def test_models_and_arguments_that_cannot_be_exported_are_one_line(tmp_path) -> None:
    cases = {
        "takes a torch.nn.Module": lambda: duotone.export(3, tmp_path / "x"),
        "export takes the path of a folder; got NoneType": lambda: duotone.export(toy(), None, scheme="MXFP8"),
        "0 is wrapped in OptimizedModule": lambda: export(nn.Sequential(torch.compile(toy())), tmp_path / "x", "MXFP8"),
        "columns are no multiple of 32": lambda: export(nn.Sequential(nn.Linear(40, 8)), tmp_path / "x", "MXFP8"),
        "ignore has 'nothing'": lambda: export(toy(), tmp_path / "x", "MXFP8", ignore=["nothing"]),
        "masters has 'a.weight'": lambda: export(toy(), tmp_path / "x", "MXFP8", masters={"a.weight": torch.zeros(1)}),
        "masters is a dict": lambda: export(toy(), tmp_path / "x", "MXFP8", masters={"0.weight": None}),
        "max_shard_bytes is '5GB'": lambda: export(toy(), tmp_path / "x", "MXFP8", max_shard_bytes="5GB"),
        "max_shard_bytes is 0": lambda: export(toy(), tmp_path / "x", "MXFP8", max_shard_bytes=0),
        "ignore is 3": lambda: export(toy(), tmp_path / "x", "MXFP8", ignore=3),
        "ignore is .None.": lambda: export(toy(), tmp_path / "x", "MXFP8", ignore=[None]),
        "the model is one Linear": lambda: export(nn.Linear(64, 64), tmp_path / "x", "MXFP8"),
        "ignore has 'head'": lambda: export(toy(), tmp_path / "x", "MXFP8", ignore="head"),
        "give calibrate=lambda": lambda: duotone.export(toy(), tmp_path / "x", scheme="FP8", calibrate=torch.ones(1)),
        "is on meta": lambda: export(toy().to("meta"), tmp_path / "x", "MXFP8"),
        "give calibrate=.*or export scheme FP8_DYNAMIC": lambda: duotone.export(toy(), tmp_path / "x", scheme="FP8"),
        "no linear would be stored as MXFP8": lambda: export(duotone.convert(toy(), "bf16"), tmp_path / "x", "MXFP8"),
        "follows no recipe outside of autocast": lambda: duotone.export(duotone.LayerNormMLP(64, 64), tmp_path / "x"),
        "did not run": lambda: duotone.export(toy(), tmp_path / "x", scheme="FP8", calibrate=lambda: None),
        "cannot be replaced; give another$": lambda: export(toy(), __file__, "MXFP8"),
        " cannot be replaced; ": lambda: export(toy(), ".", "MXFP8"),
    }
    for message, call in cases.items():
        with pytest.raises(duotone.UserError, match=message) as raised:
            call()
        assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_an_export_takes_no_folder_in_which_programs_work(tmp_path, monkeypatch) -> None:
    """A new folder takes its place, so a program in the old one would write into nothing."""
    work = tmp_path / "project" / "run"
    work.mkdir(parents=True)
    project = work.parent
    with pytest.raises(
        duotone.UserError, match="project has folders and no model, so an export does not take its plac"
    ):
        export(toy(), project, "MXFP8")
    (project / "config.json").write_text("{}")  # as the folder of a Trainer, which has checkpoints
    monkeypatch.chdir(work)
    for path in (".", "..", "../.."):
        with pytest.raises(duotone.UserError, match="cannot be replaced; give another"):
            export(toy(), path, "MXFP8")
    monkeypatch.chdir(tmp_path)
    project.chmod(0o2775)
    export(toy(), project, "MXFP8")
    assert project.stat().st_mode & 0o7777 == 0o2775 and work.is_dir()


def test_shards_have_an_index_and_at_most_the_size(tmp_path) -> None:
    export(toy(), tmp_path / "x", "MXFP8", max_shard_bytes=100_000)
    index = json.loads((tmp_path / "x" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "x").glob("*.safetensors"))
    assert len(files) > 2 and set(index["weight_map"].values()) == {file.name for file in files}
    whole = {name: value for file in files for name, value in load_file(file).items()}
    export(toy(), tmp_path / "y", "MXFP8")
    one = load_file(tmp_path / "y" / "model.safetensors")
    assert whole.keys() == one.keys() == index["weight_map"].keys()
    assert all(
        torch.equal(whole[n].view(torch.uint8), value.view(torch.uint8)) for n, value in one.items() if value.dim()
    )
    assert all(sum(t.nbytes for t in load_file(file).values()) <= 100_000 for file in files)


def test_a_failure_leaves_the_old_files_and_nothing_else(tmp_path, monkeypatch) -> None:
    export(toy(), tmp_path / "x", "MXFP8")
    (tmp_path / "x" / "tokenizer.json").write_text("mine")
    before = {file.name: file.read_bytes() for file in (tmp_path / "x").iterdir()}
    calls = []

    def fail(self):
        calls.append(self.name)
        if len(calls) == 5:
            raise OSError("no space left on device")
        return type(self).original(self)

    monkeypatch.setattr(
        exported_weight.ExportedWeight, "original", exported_weight.ExportedWeight.tensors, raising=False
    )
    monkeypatch.setattr(exported_weight.ExportedWeight, "tensors", fail)
    with pytest.raises(duotone.UserError, match=r"cannot export to .*x \(no space left on device\): make room"):
        export(toy(), tmp_path / "x", "FP8_DYNAMIC")
    assert {file.name: file.read_bytes() for file in (tmp_path / "x").iterdir()} == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def damage(record) -> None:
    """Valid JSON without the notes of the first shard."""
    *digest, text = record.read_text().split("\n")
    shards = json.loads(text)
    next(iter(shards.values())).pop()
    record.write_text("\n".join([*digest, json.dumps(shards)]))


def replace_by_folder(record) -> None:
    record.unlink()
    record.mkdir()


RESUMED = {
    "the same": (lambda model, partial: None, 2),
    "a weight was trained": (lambda model, partial: model.embed.weight.data.add_(1), 1),
    "a shard was damaged": (lambda model, partial: sorted(partial.glob("*.safetensors"))[0].write_bytes(b"x" * 99), 1),
    "no record": (lambda model, partial: (partial / "progress.json").write_text("[{"), 0),
    "the record is no table": (lambda model, partial: (partial / "progress.json").write_text("3"), 0),
    "the record was damaged": (lambda model, partial: damage(partial / "progress.json"), 0),
    "the record is a folder": (lambda model, partial: replace_by_folder(partial / "progress.json"), 0),
    "a folder of others was copied": (lambda model, partial: (partial / "more").mkdir(), 2),
}


@pytest.mark.parametrize("change", RESUMED)
def test_an_export_that_died_goes_on_after_its_whole_shards(change: str, tmp_path, monkeypatch) -> None:
    """The old folder survives, and the result is that of an export that did not die."""
    model, options = toy(), {"scheme": "NVFP4A16", "max_shard_bytes": 50_000}
    export(model, tmp_path / "x", "MXFP8")
    before = {file.name: file.read_bytes() for file in (tmp_path / "x").iterdir()}
    written: list[str] = []

    def write(path, specs, pieces) -> None:
        if len(written) == limit:
            raise KeyboardInterrupt
        written.append(path.name)
        write_tensors(path, specs, pieces)

    monkeypatch.setattr(folder, "write_tensors", write)
    limit = 2
    with pytest.raises(KeyboardInterrupt):
        duotone.export(model, tmp_path / "x", **options)
    assert {file.name: file.read_bytes() for file in (tmp_path / "x").iterdir()} == before
    act, whole = RESUMED[change]
    act(model, tmp_path / ".x.partial")
    limit = -1
    written.clear()
    report = duotone.export(model, tmp_path / "x", **options)
    shards = len(list((tmp_path / "x").glob("*.safetensors")))
    assert len(written) == shards - whole and shards > 3
    written.clear()
    assert report == duotone.export(model, tmp_path / "y", **options) and len(written) == shards
    files = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in "xy"]
    assert files[0] == files[1] and len(list(tmp_path.iterdir())) == 2


def test_a_second_export_to_the_same_path_is_refused_while_the_first_one_runs(tmp_path, monkeypatch) -> None:
    (tmp_path / ".x.lock").write_text("process 1")  # what an export that was killed leaves
    refused: list[str] = []

    def write(path, specs, pieces) -> None:
        with pytest.raises(
            duotone.UserError, match=f"/x is in use by process {os.getpid()} on .*one process"
        ) as raised:
            duotone.export(toy(), tmp_path / "x", scheme="MXFP8")
        refused.append(str(raised.value))
        write_tensors(path, specs, pieces)

    monkeypatch.setattr(folder, "write_tensors", write)
    export(toy(), tmp_path / "x", "MXFP8")
    assert len(refused) == 1 and "\n" not in refused[0]
    monkeypatch.undo()
    export(toy(), tmp_path / "y", "MXFP8")
    files = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in "xy"]
    assert files[0] == files[1] and sorted(entry.name for entry in tmp_path.iterdir()) == ["x", "y"]


@pytest.mark.parametrize("change", ["removed", "cut"])
def test_an_old_export_stays_if_a_shard_of_the_new_one_disappears(change: str, tmp_path, monkeypatch) -> None:
    export(toy(), tmp_path / "x", "MXFP8")
    before = {file.name: file.read_bytes() for file in (tmp_path / "x").iterdir()}

    def write(path, specs, pieces) -> None:
        for shard in sorted(path.parent.glob("*.safetensors"))[:1]:
            shard.unlink() if change == "removed" else os.truncate(shard, 100)
        write_tensors(path, specs, pieces)

    monkeypatch.setattr(folder, "write_tensors", write)
    with pytest.raises(duotone.UserError, match=r"model-00001-of-\d+.safetensors was changed while [^\n]*again$"):
        export(toy(), tmp_path / "x", "MXFP8", max_shard_bytes=100_000)
    assert {file.name: file.read_bytes() for file in (tmp_path / "x").iterdir()} == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_an_export_writes_through_no_link_in_its_partial_folder(link, tmp_path) -> None:
    precious, partial = tmp_path / "mine", tmp_path / ".x.partial"
    precious.write_text("precious")
    record = json.dumps({"model.safetensors": ["", "", []]})
    for text in (record, f"{hashlib.sha256(record.encode()).hexdigest()}\n{record}"):
        partial.mkdir()
        (partial / "progress.json").write_text(text)
        for name in ("model.safetensors", "config.json", "duotone.json", "new"):
            link(precious, partial / name)
        export(toy(), tmp_path / "x", "MXFP8")
        assert precious.read_text() == "precious" and not [
            file for file in (tmp_path / "x").iterdir() if file.is_symlink()
        ]


@pytest.mark.parametrize("target", ["file", "folder", "lock", None])
def test_a_partial_path_that_is_no_folder_is_one_line_and_nothing_changes(target: str | None, tmp_path) -> None:
    """A link to a file or a folder, a link instead of the lock, or a file."""
    export(toy(), tmp_path / "x", "MXFP8")
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").write_text("precious")
    if target is None:
        (tmp_path / ".x.partial").write_text("precious")
    elif target == "lock":
        (tmp_path / ".x.lock").symlink_to(tmp_path / "file")
    else:
        (tmp_path / ".x.partial").symlink_to(tmp_path / target)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    message = (
        r"^cannot lock [^\n]*$" if target == "lock" else r"\.x\.partial, which is a file or a link; move that away$"
    )
    with pytest.raises(duotone.UserError, match=message):
        export(toy(), tmp_path / "x", "BF16")
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_a_weight_is_encoded_some_rows_at_a_time_with_the_bits_of_the_whole(tmp_path, monkeypatch) -> None:
    linear = nn.Linear(512, 1000, bias=False)
    for name, scheme in schemes.SCHEMES.items():
        if scheme.input_scale == "input_global_scale":
            continue
        options = {"scheme": name, "calibrate": lambda: linear(torch.ones(1, 512))}
        whole = duotone.export(nn.Sequential(linear), tmp_path / "whole", **options)
        with monkeypatch.context() as patch:
            patch.setattr(tensor_file, "PIECE", 2**16)
            report = duotone.export(nn.Sequential(linear), tmp_path / "rows", **options)
        files = [(tmp_path / each / "model.safetensors").read_bytes() for each in ("whole", "rows")]
        assert files[0] == files[1] and report.rows[0].error == pytest.approx(whole.rows[0].error, rel=1e-5)


def test_a_new_export_replaces_its_files_and_keeps_those_of_others(tmp_path) -> None:
    export(toy(), tmp_path / "x", "MXFP8", max_shard_bytes=100_000)
    (tmp_path / "x" / "tokenizer.json").write_text("mine")
    (tmp_path / "x" / "more").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "x")
    (tmp_path / "x" / "model_of_mine.safetensors").write_bytes(b"1")
    (tmp_path / "x" / "more" / "a.txt").write_text("mine too")
    export(toy(), tmp_path / "link", "BF16")
    assert (tmp_path / "link").is_symlink() and len(list(tmp_path.iterdir())) == 2
    names = {str(file.relative_to(tmp_path / "x")) for file in (tmp_path / "x").rglob("*") if file.is_file()}
    names.remove("model_of_mine.safetensors")
    assert names == {"model.safetensors", "config.json", "duotone.json", "tokenizer.json", "more/a.txt"}
    assert "quantization_config" not in json.loads((tmp_path / "x" / "config.json").read_text())


def test_an_export_that_died_between_its_renames_is_undone(tmp_path) -> None:
    export(toy(), tmp_path / "x", "MXFP8")
    (tmp_path / "x").rename(tmp_path / ".x.before")
    with pytest.raises(duotone.UserError, match=r"is no folder of an export; an export died, and .*\.x\.before holds"):
        duotone.load(tmp_path / "x")
    with pytest.raises(duotone.UserError, match="cannot be served"):
        export(toy(), tmp_path / "x", "MXFP5")
    export(toy(), tmp_path / "x", "FP8_DYNAMIC")
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


class RealStorages(LiveStorages):
    """Without those on meta, which have a size and no memory."""

    def _add(self, tensor: torch.Tensor) -> None:
        if not tensor.is_meta:
            super()._add(tensor)


@pytest.mark.parametrize("scheme", ["FP8_BLOCK", "MXFP8", "NVFP4A16"])
def test_memory_is_that_of_a_shard_and_some_rows(scheme: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tensor_file, "PIECE", 2**16)
    model = nn.Sequential(nn.Embedding(8192, 512), nn.Linear(512, 8192, bias=False), nn.Linear(128, 64, bias=False))
    weights = list(model.parameters())
    with RealStorages(weights) as live:
        report = duotone.export(model, tmp_path / "x", scheme=scheme, max_shard_bytes=1)  # a file for each
    largest = 2 * weights[0].numel()  # the embedding in bf16
    assert report.bytes > 10 * 2**20
    assert live.peak - total_bytes(weights) <= largest + 2**16 * 40


def test_the_compiler_is_asked_for_exports_of_many_parameters_alone(tmp_path, monkeypatch) -> None:
    calls, threads = [], torch.get_num_threads()
    monkeypatch.setattr(stages, "COMPILE_FROM", 1 << 15)
    monkeypatch.setattr(stages, "compiler_reason", lambda: calls.append(torch.get_num_threads()) or "off in this test")
    model = nn.Sequential(nn.Linear(256, 256))
    small = duotone.export(model, tmp_path / "x", scheme="NVFP4A16")
    assert not calls
    monkeypatch.setattr(exporting, "COMPILE_FROM", 0)
    large = duotone.export(model, tmp_path / "y", scheme="NVFP4A16")
    assert set(calls) == {threads} and torch.get_num_threads() == threads
    assert small == large and same_files(tmp_path / "x", tmp_path / "y")


def same_files(one, other) -> bool:
    names = [sorted(file.name for file in folder.iterdir()) for folder in (one, other)]
    return names[0] == names[1] and all((one / name).read_bytes() == (other / name).read_bytes() for name in names[0])


def test_an_export_of_a_model_that_follows_no_recipe_warns(tmp_path) -> None:
    with pytest.warns(UserWarning, match=r"nothing in the model follows recipes.*; call duotone\.convert before"):
        report = duotone.export(nn.Sequential(nn.Linear(32, 32)), tmp_path / "x")
    assert report.scheme == "BF16"
