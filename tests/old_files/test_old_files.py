"""Files that commit e6c5b1f wrote load, with the values that they had there, and go on with the same results."""

import gzip
import importlib.util
import io
import json
import pkgutil
import sys
from typing import Any

import old_cases as cases
import pytest
import torch
from torch import Tensor

import duotone
from duotone import recipes
from duotone.compat.old_paths import MOVED
from duotone.compat.quantizers import Float8Quantizer
from duotone.lab import checkpoint, data
from duotone.lab.config import TrainConfig
from duotone.lab.presets import ModelConfig, Preset
from duotone.lab.trainer import Trainer
from duotone.tensor import QuantizedTensor

SAME_MACHINE = json.loads((cases.FOLDER / "machine.json").read_text()) == cases.machine()


def load(name: str, weights_only: bool = False) -> Any:
    content = gzip.decompress((cases.FOLDER / f"{name}.pt.gz").read_bytes())
    return torch.load(io.BytesIO(content), weights_only=weights_only)


def names(prefix: str) -> list[str]:
    return sorted(path.name.removesuffix(".pt.gz") for path in cases.FOLDER.glob(f"{prefix}*.pt.gz"))


def same_output(result: Any, want: Any) -> None:
    """Bit for bit on a machine like the one that wrote the file; elsewhere sums may have another order."""
    exact = {"rtol": 0.0, "atol": 0.0} if SAME_MACHINE else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(result, want, **exact)


@pytest.mark.parametrize("recipe", cases.RECIPES)
def test_state_dicts_with_quantized_parameters(recipe: str) -> None:
    stored = load(f"state-{recipe}", weights_only=True)
    model = cases.empty_quantized_model(recipe)
    model.load_state_dict(stored["state"])
    duotone.load_rng_state(model, stored["rng_state"])
    parameters = dict(model.named_parameters())
    assert stored["decoded"]
    for name, decoded in stored["decoded"].items():
        assert isinstance(parameters[name], QuantizedTensor)
        assert torch.equal(parameters[name].dequantize(), decoded)
    state = model.state_dict()
    for name, value in stored["state"].items():
        assert torch.equal(torch.as_tensor(state[name]), torch.as_tensor(value)), name
    with torch.no_grad(), duotone.autocast(recipe=cases.load_recipe(recipe)):
        same_output(model.eval()(cases.matrix()), stored["output"])


def test_state_dicts_of_delayed_scaling_hold_its_histories() -> None:
    state = load("state-fp8-delayed", weights_only=True)["state"]
    assert {key.rpartition(".")[2] for key in state} >= {"scale", "amax_history"}


@pytest.mark.parametrize("name", [name for name in names("module-") if name != "module-ops"])
def test_pickled_modules_give_the_output_of_their_release(name: str) -> None:
    stored = load(name)
    _, call = cases.modules()[name.removeprefix("module-")]
    with torch.no_grad():
        same_output(call(stored["module"]), stored["output"])


@pytest.mark.parametrize("name", [name for name in names("module-") if name != "module-ops"])
def test_pickled_modules_train_and_can_be_pickled_again(name: str) -> None:
    module = load(name)["module"].train()
    _, call = cases.modules()[name.removeprefix("module-")]
    output = call(module)
    output = output[0] if isinstance(output, tuple) else output
    if output.requires_grad:
        output.float().square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
    content = io.BytesIO()
    torch.save(module, content)
    again = torch.load(io.BytesIO(content.getvalue()), weights_only=False)
    assert type(again) is type(module)


@pytest.mark.parametrize("name", names("module-"))
def test_pickled_modules_have_what_modules_have_now(name: str) -> None:
    """Attributes that came later have a value on the class."""
    old = dict(load(name)["module"].named_modules())
    new, _ = cases.modules().get(name.removeprefix("module-"), (cases.small_ops(), None))
    for path, module in new.named_modules():
        assert type(old[path]) is type(module)
        assert [name for name in vars(module) if not hasattr(old[path], name)] in ([], ["_rewritten"])


def test_pickled_ops_give_the_output_of_their_release() -> None:
    stored = load("module-ops")
    assert list(stored["module"]) == list(cases.small_ops())
    with torch.no_grad():
        same_output(cases.outputs_of(stored["module"]), stored["output"])


VALUES = cases.values()


@pytest.mark.parametrize("name", VALUES)
def test_pickled_values_equal_those_of_today(name: str) -> None:
    result, want = load("values")[name], VALUES[name]
    assert type(result) is type(want)
    assert result == want
    assert hash(result) == hash(want)
    assert repr(result) == repr(want)


def test_the_values_are_all_there() -> None:
    assert load("values").keys() == VALUES.keys()


@pytest.mark.parametrize("name", [name for name in VALUES if name.startswith("recipe")])
def test_pickled_recipes_give_the_same_quantizers(name: str) -> None:
    result, want = load("values")[name], VALUES[name]
    for tensor_type in ("input", "weight", "grad_output"):
        role = recipes.QuantizerRole("linear", tensor_type, "layers.1")
        assert result(role) == want(role)


def test_a_pickled_handle_of_delayed_scaling() -> None:
    handle = load("bound-handle")
    assert isinstance(handle, Float8Quantizer)
    tensor, want = handle.quantize(cases.matrix()), cases.bound_handle().quantize(cases.matrix())
    assert torch.equal(tensor.dequantize(), want.dequantize())
    assert handle.amax.item() == cases.matrix().abs().max().item()


TENSORS = cases.tensors()


@pytest.mark.parametrize("name", TENSORS)
def test_quantized_tensors_load_with_their_bytes(name: str) -> None:
    stored, want = load("tensors", weights_only=True)[name], TENSORS[name]
    result = stored["tensor"]
    assert type(result) is type(want)
    assert isinstance(result, torch.nn.Parameter) == isinstance(want, torch.nn.Parameter)
    assert result.requires_grad == want.requires_grad
    assert torch.equal(result.detach().dequantize(), stored["decoded"])
    assert result.quantizer == want.quantizer
    for plane, other in zip(result.planes, want.planes, strict=True):
        assert (plane is None) == (other is None)
        if plane is not None:
            assert plane.format == other.format
            assert all(torch.equal(bits(plane.parts[part]), bits(other.parts[part])) for part in other.parts)


def bits(part: Tensor) -> Tensor:
    return part.contiguous().view(torch.uint8)


def test_an_optimizer_goes_on_from_its_state() -> None:
    stored = load("optimizer-state", weights_only=True)
    model = cases.empty_quantized_model("mxfp8")
    adamw = cases.optimizer(model)
    model.load_state_dict(stored["before"]["model"])
    adamw.load_state_dict(stored["before"]["optimizer"])
    cases.step(model, adamw, 1)
    assert len(stored["masters"]) == 2
    same_output(cases.masters(adamw), stored["masters"])


def test_a_pickled_optimizer_goes_on() -> None:
    adamw = load("optimizer")
    assert isinstance(adamw, duotone.optim.AdamW)
    before = [p.detach().float().clone() for p in adamw.param_groups[0]["params"]]
    for parameter in adamw.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter.detach().dequantize() if hasattr(parameter, "planes") else parameter)
    adamw.step()
    after = [p.detach().float() for p in adamw.param_groups[0]["params"]]
    assert not any(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_a_pickled_tap_has_its_rows() -> None:
    stored = load("tap")
    for result, want in zip(stored["tap"].rows(), stored["rows"], strict=True):
        assert {key: result[key] for key in want} == want


RECIPE_FILES = json.loads((cases.FOLDER / "recipes.json").read_text())


@pytest.mark.parametrize("name", sorted(cases.built_in_recipes().keys() & RECIPE_FILES.keys()))
def test_recipe_files_load_with_a_warning_of_renamed_fields(name: str) -> None:
    with pytest.warns(DeprecationWarning, match="has been renamed: use (min_weight|wgrad_input)_"):
        read = recipes.from_dict(RECIPE_FILES[name])
    assert read == cases.built_in_recipes()[name]


def test_an_op_that_was_called_can_be_pickled() -> None:
    result = cases.small_ops()
    want = cases.outputs_of(result)
    content = io.BytesIO()
    torch.save(result, content)
    again = torch.load(io.BytesIO(content.getvalue()), weights_only=False)
    assert torch.equal(cases.outputs_of(again), want)


def test_paths_of_old_pickles_lead_to_what_is_there_now() -> None:
    for old, new in MOVED.items():
        module, _, name = old.partition(":")
        assert module in sys.modules
        if name:
            assert getattr(sys.modules[module], name) is pkgutil.resolve_name(new)
        else:
            assert importlib.util.find_spec(new) is not None
            assert not hasattr(sys.modules[module], "no_such_name")


def test_old_modules_leave_public_names_alone() -> None:
    load("module-converted-subclass")  # refers to duotone.convert.targets
    assert callable(duotone.convert)
    assert callable(duotone.observe.ledger)


def test_a_schedule_file_loads_with_a_warning_of_renamed_fields() -> None:
    with pytest.warns(DeprecationWarning):
        assert recipes.any_from_dict(RECIPE_FILES["schedule"]) == VALUES["schedule"]


def test_fields_of_recipes_that_have_other_names_now() -> None:
    square, small = load("renamed-fields")
    assert square == recipes.Float8BlockScaling(wgrad_input_128x128=True)
    assert small == recipes.MXFP8BlockScaling(min_weight_elements=4096)
    with pytest.warns(DeprecationWarning):
        assert recipes.from_dict(RECIPE_FILES["fp8-block square"]) == square
        measured = recipes.from_dict(RECIPE_FILES["measured"])
    assert measured == recipes.MXFP8BlockScaling(min_weight_elements="measured")


def test_a_run_of_the_laboratory_goes_on() -> None:
    stored = json.loads((cases.FOLDER / "run.json").read_text())
    folder = cases.FOLDER / "run" / stored["folder"]
    saved = checkpoint.load(folder)
    config = TrainConfig(
        Preset(**{**saved.meta["config"]["preset"], "model": ModelConfig(**saved.meta["config"]["preset"]["model"])}),
        steps=saved.meta["config"]["steps"],
    )
    corpus = data.load([str(cases.FOLDER / "text.txt")], context=config.preset.model.context)
    trainer = Trainer(config, cases.load_recipe("fp8-delayed"), corpus)
    trainer.restore(saved, folder)
    assert trainer.completed == 1
    same_output(torch.tensor(trainer.step()), torch.tensor(stored["next_loss"]))
