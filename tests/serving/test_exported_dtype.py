"""The codes of an export are those that training multiplied, also where torch.autocast cast fp32 weights."""

import warnings
from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from causal import mixtral
from safetensors.torch import load_file
from torch import nn
from toy import toy

import duotone
from duotone.serving import exporting
from duotone.serving.exporting import ExportOptions, write_export

SCHEMES = ["FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "MXFP4", "NVFP4", "NVFP4A16"]
HALVES = [torch.bfloat16, torch.float16]


def autocast(dtype):
    return torch.autocast("cpu", dtype) if dtype is not None else nullcontext()


def exported(model, path, around=None, write=duotone.export, **options):
    """The stored tensors, and the warnings about dtypes."""
    with warnings.catch_warnings(record=True) as told, autocast(around):
        warnings.simplefilter("always")
        write(model, path, **options)
    return load_file(path / "model.safetensors"), [str(each.message) for each in told if "dtype=" in str(each.message)]


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[k].reshape(-1).view(torch.uint8), other[k].reshape(-1).view(torch.uint8)) for k in one
    )


def codes(tensors):
    return {name: tensor for name, tensor in tensors.items() if "_proj.weight" in name}


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-rowwise", "fp8-block", "mxfp8"])
@pytest.mark.parametrize("dtype", [*HALVES, None])
@pytest.mark.parametrize("way", ["inside of autocast", "by dtype="])
def test_a_server_multiplies_the_weights_of_the_training_forward(recipe: str, dtype, way: str, tmp_path) -> None:
    model = duotone.convert(nn.Sequential(nn.Linear(256, 256, bias=False)), recipe, rules=())
    with torch.no_grad(), autocast(dtype):
        trained = model(torch.eye(256)).T.float()  # an input of ones and zeros shows the decoded weight
    named = {"dtype": dtype or torch.float32} if way == "by dtype=" or dtype is None else {}
    _, told = exported(model, tmp_path / "x", None if named else dtype, **named)
    served = duotone.load(tmp_path / "x")["0.weight"].dequantize(torch.float32)
    served = served.to(dtype or torch.float32).float()
    torch.testing.assert_close(served, trained, rtol=1e-2, atol=0)  # another code is 6 % away
    assert not told


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", HALVES)
def test_every_scheme_encodes_what_autocast_reads(scheme: str, dtype, tmp_path) -> None:
    """Calibration, global scales of fused linears, and scales over all rows see the same values as the codes."""
    model, x = toy().layers[0], torch.randn(64, 128)
    options = {"scheme": scheme, "calibrate": lambda: model(x)}
    half = deepcopy(model).to(dtype)
    expected, _ = exported(half, tmp_path / "e", scheme=scheme, calibrate=lambda: half(x.to(dtype)))
    inside, _ = exported(model, tmp_path / "i", dtype, **options)
    named, told = exported(model, tmp_path / "n", dtype=dtype, **options)
    wide, _ = exported(model, tmp_path / "w", dtype=torch.float32, **options)
    assert same(codes(inside), codes(named)) and not told and not same(codes(named), codes(wide))
    assert same(codes(named), codes(expected))


@pytest.mark.parametrize("kind", ["linear", "norm and linear", "experts", "masters of half weights"])
@pytest.mark.parametrize("write", ["duotone", "a layout of an integration"])
def test_all_weights_are_encoded_from_the_dtype_of_training(kind: str, write: str, tmp_path) -> None:
    options: dict = {"scheme": "MXFP8"}
    if kind == "experts":
        model = mixtral()
        options["ignore"] = ["*experts*"] if write == "duotone" else []
    elif kind == "norm and linear":
        model = nn.Sequential(duotone.LayerNormLinear(64, 64, recipe=duotone.recipes.load("mxfp8")))
    else:
        model = nn.ModuleDict({"a_proj": nn.Linear(64, 64)})
    half, masters = deepcopy(model).bfloat16(), None
    if kind == "masters of half weights":
        masters = {"a_proj.weight": model["a_proj"].weight.detach()}
        model = half
    call = duotone.export
    if write != "duotone":
        if kind == "experts":
            from duotone.integrations.transformers import export as call
        else:
            call = lambda model, path, **given: write_export(model, path, ExportOptions(**given))  # noqa: E731
    expected, _ = exported(half, tmp_path / "half", write=call, **options)
    if masters is not None:
        options["masters"] = masters
    else:
        named, told = exported(model, tmp_path / "named", write=call, dtype=torch.bfloat16, **options)
        assert same(named, expected) and not told
    inside, told = exported(model, tmp_path / "inside", torch.bfloat16, write=call, **options)
    assert same(inside, expected) and not told
    wide, told = exported(model, tmp_path / "wide", write=call, dtype=torch.float32, **options)
    assert not same(wide, expected) and not told


def test_weights_of_an_unknown_dtype_are_one_warning_that_names_the_argument(tmp_path) -> None:
    model = duotone.convert(toy(), "mxfp8")
    tensors, told = exported(model, tmp_path / "x")
    assert len(told) == 1 and "\n" not in told[0]
    assert told[0].startswith("layers.0.q_proj.weight and 13 others are encoded from fp32; if torch.autocast")
    assert "dtype=torch.bfloat16" in told[0] and "dtype=torch.float32" in told[0]
    assert same(tensors, exported(model, tmp_path / "y", dtype=torch.float32)[0])


def test_known_dtypes_have_no_warning(tmp_path) -> None:
    """Half weights, planes, and exports in which nothing is encoded. A head is stored in bf16 under any dtype."""
    held = duotone.convert(toy(), "mxfp8")
    duotone.convert_parameters(held, duotone.recipes.load("mxfp8"))
    for at, (model, options) in enumerate(
        [(toy().bfloat16(), {"scheme": "MXFP8"}), (held, {}), (toy(), {"scheme": "BF16"})]
    ):
        tensors, told = exported(model, tmp_path / str(at), **options)
        assert not told and tensors["lm_head.weight"].dtype is torch.bfloat16
        assert same(tensors, exported(model, tmp_path / "again", dtype=torch.float16, **options)[0]) == (at > 0)


def test_an_export_goes_on_after_a_death_only_from_the_same_dtype(tmp_path, monkeypatch) -> None:
    """The whole shards of a dead export count only if they were encoded from that dtype."""
    model = toy()
    with monkeypatch.context() as patched:
        patched.setattr(exporting, "_texts", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            duotone.export(model, tmp_path / "x", scheme="MXFP8", dtype=torch.float32)
    tensors, _ = exported(model, tmp_path / "x", scheme="MXFP8", dtype=torch.bfloat16)
    assert same(tensors, exported(model, tmp_path / "y", scheme="MXFP8", dtype=torch.bfloat16)[0])


@pytest.mark.parametrize("dtype", ["bfloat16", torch.int8, torch.float8_e4m3fn, 3])
def test_a_dtype_that_no_weight_is_read_in_is_one_line(dtype, tmp_path) -> None:
    with pytest.raises(duotone.UserError, match=r"^dtype is .*; give one of torch\.float32, [^\n]*$"):
        duotone.export(toy(), tmp_path / "x", scheme="MXFP8", dtype=dtype)
    assert not (tmp_path / "x").exists()
