"""Inputs that no module and no quantizer takes are one line of ours, whatever the recipe, and never a number."""

import pytest
import torch
from torch import nn

import duotone
from duotone import Quantizer, formats, recipes
from duotone.compat import MXFP8Quantizer
from duotone.errors import UserError
from duotone.recipes import HighPrecision

INPUTS = {
    "nested": lambda: torch.nested.nested_tensor([torch.ones(3, 32), torch.ones(5, 32)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(3, 32), torch.ones(5, 32)], layout=torch.jagged),
    "coo": lambda: torch.ones(4, 32).to_sparse(),
    "csr": lambda: torch.ones(4, 32).to_sparse_csr(),
    "list": lambda: [[1.0] * 32],
    "none": lambda: None,
    "complex": lambda: torch.ones(4, 32, dtype=torch.complex64),
    "fp64": lambda: torch.ones(4, 32, dtype=torch.float64),
    "integer": lambda: torch.ones(4, 32, dtype=torch.int64),
    "bool": lambda: torch.ones(4, 32, dtype=torch.bool),
    "float8": lambda: torch.ones(4, 32).to(torch.float8_e4m3fn),
}
bad_inputs = pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS.keys())
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of layouts in prototype
RECIPES = {"mxfp8": recipes.load("mxfp8"), "delayed": recipes.load("fp8-delayed"), "high precision": HighPrecision()}


def refused(call) -> None:
    with pytest.raises(UserError) as error:
        call()
    assert "\n" not in str(error.value)


@bad_inputs
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_modules_refuse_bad_inputs_in_one_line(make, recipe) -> None:
    x = make()
    linear = duotone.Linear(32, 32, recipe=recipe)
    converted = duotone.convert(nn.Sequential(nn.Linear(32, 32)), recipe)
    normed = duotone.LayerNormLinear(32, 32, recipe=recipe)
    for module in (linear, converted, normed):
        refused(lambda module=module: module(x))
    refused(lambda: linear(torch.tensor(1.0)))


@bad_inputs
def test_quantizers_refuse_bad_inputs_in_one_line(make) -> None:
    x = make()
    value = Quantizer(formats.get("mxfp8_e4m3"), formats.get("mxfp8_e4m3"))
    tensor = value.quantize(torch.ones(4, 32))
    for quantizer in (value, MXFP8Quantizer(), Quantizer()):
        refused(lambda quantizer=quantizer: quantizer.quantize(x))
    refused(lambda: tensor.quantize_(x))
    assert torch.equal(tensor.dequantize(), torch.ones(4, 32))


@pytest.mark.parametrize("layout", ["nested", "coo", "csr"])
def test_a_refused_copy_changes_no_value(layout) -> None:
    tensor = MXFP8Quantizer().quantize(torch.ones(4, 32))
    x = INPUTS[layout]()
    refused(lambda: tensor.copy_(x))
    assert torch.equal(tensor.dequantize(), torch.ones(4, 32))
