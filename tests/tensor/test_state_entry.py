"""Entries of a state_dict are saved by code that reads memory: high precision, as the values are at that moment."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model

import duotone
from duotone import recipes

NAMES = ["mxfp8", "nvfp4", "fp8-current", "fp8-delayed"]


def quantized(name: str = "mxfp8", dtype: torch.dtype = torch.float32) -> duotone.Linear:
    with duotone.quantized_model_init(recipe=recipes.load(name)):
        return duotone.Linear(64, 32, params_dtype=dtype, name="linear")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_safetensors_hold_the_values_in_the_nominal_dtype(name: str, dtype: torch.dtype, tmp_path) -> None:
    layer = quantized(name, dtype)
    save_file(layer.state_dict(), tmp_path / "a.safetensors")
    saved = load_file(tmp_path / "a.safetensors")["weight"]
    assert type(saved) is torch.Tensor
    assert saved.dtype == dtype and torch.equal(saved, layer.weight.dequantize())


def test_a_state_dict_follows_later_writes_as_a_plain_one_does(tmp_path) -> None:
    layer = quantized()
    state = layer.state_dict()
    address = state["weight"].data_ptr()
    with torch.no_grad():
        layer.weight.fill_(2.0)
    assert state["weight"].data_ptr() == address
    save_file(state, tmp_path / "a.safetensors")
    assert bool((load_file(tmp_path / "a.safetensors")["weight"] == 2).all())


def test_a_copy_of_an_entry_has_an_address_too() -> None:
    entry = quantized().state_dict()["weight"]
    copied = entry.to("cpu", copy=True)
    assert copied.data_ptr() not in (0, entry.data_ptr())
    assert copied.untyped_storage().nbytes() == 4 * 64 * 32


def test_a_parameter_has_no_address_for_others_to_write_to() -> None:
    layer = quantized()
    for holder in (layer.weight, layer.weight.detach(), layer.state_dict(keep_vars=True)["weight"]):
        with pytest.raises(duotone.UserError, match=r"^a quantized tensor is planes.*; use dequantize\(\)[^\n]*$"):
            holder.data_ptr()
    other = quantized()
    other.load_state_dict(copy.deepcopy(layer.state_dict()), assign=True)
    with pytest.raises(duotone.UserError, match="no address"):
        other.weight.data_ptr()


def test_weights_of_experts_and_tied_ones_are_saved_under_each_name(tmp_path) -> None:
    with duotone.quantized_model_init(recipe=recipes.load("mxfp8")):
        model = torch.nn.ModuleDict({"a": duotone.Linear(32, 32), "e": duotone.GroupedLinear(2, 32, 32)})
    model["b"] = model["a"]
    save_model(model, str(tmp_path / "a.safetensors"))
    saved = load_file(tmp_path / "a.safetensors")
    weights = {name: w.dequantize() for name, w in model.state_dict().items() if "weight" in name}
    assert weights.keys() == {"a.weight", "b.weight", "e.weight0", "e.weight1"}
    assert all(torch.equal(saved[name], values) for name, values in weights.items())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_plain_weights_that_a_load_assigns_are_told(device: str) -> None:
    """torch's `set_model_state_dict` assigns to a model on meta without being asked."""
    with torch.device(device), duotone.quantized_model_init(recipe=recipes.load("fp8-delayed")):
        layer = duotone.Linear(32, 32, bias=False)
    values = torch.full((32, 32), 0.5)
    with pytest.warns(UserWarning, match="assign=True put plain weights in place of quantized ones"):
        layer.load_state_dict({**layer.state_dict(), "weight": values}, assign=True)
    assert torch.equal(layer.weight, values)
