"""CustomRecipe: called once per slot when a plan is built, and loud about what it returns."""

import pytest
import torch
from torch import nn

import duotone
from duotone import CustomRecipe, HybridQuantizer, IdentityQuantizer, Quantizer, formats
from duotone.errors import RecipeError
from duotone.tensor.vocabulary import MXFP8Quantizer


def test_a_factory_is_called_once_per_slot_and_never_per_step() -> None:
    calls = []

    def factory(role):
        calls.append(str(role))
        return MXFP8Quantizer()

    m = nn.ModuleDict({"proj": nn.Linear(32, 32)})
    duotone.convert(m, CustomRecipe(qfactory=factory))
    assert calls == [f"module_type=linear|tensor_type={t}|name=proj" for t in ("input", "weight", "grad_output")]
    calls.clear()
    for _ in range(3):
        m["proj"](torch.randn(4, 32)).sum().backward()
    assert len(calls) == 3


def test_a_factory_may_return_values_or_handles() -> None:
    hybrid = HybridQuantizer(rowwise_quantizer=MXFP8Quantizer(), columnwise_quantizer=IdentityQuantizer())
    assert CustomRecipe(qfactory=lambda role: hybrid)(duotone.QuantizerRole()) == Quantizer(formats.get("mxfp8_e4m3"))
    value = Quantizer(formats.get("nvfp4"))
    assert CustomRecipe(qfactory=lambda role: value)(duotone.QuantizerRole()) is value


@pytest.mark.parametrize("returned", [None, "mxfp8", 3])
def test_a_factory_that_returns_rubbish_is_named_with_its_slot_and_nothing_changes(returned) -> None:
    m = nn.ModuleDict({"proj": nn.Linear(32, 32)})
    with pytest.raises(
        RecipeError, match=r"qfactory returned \w+ for module_type=linear\|tensor_type=input\|name=proj"
    ):
        duotone.convert(m, CustomRecipe(qfactory=lambda role: returned))
    assert type(m["proj"]) is nn.Linear
