"""A recipe's name, or its file, is accepted wherever a recipe is."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import duotone
from duotone import observe, ops, recipes
from duotone.recipes import Phase, RuleRecipe, Schedule
from duotone.tensor import QuantizedTensor

MXFP8 = recipes.MXFP8BlockScaling()


def two_linears() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))


TAKERS: dict[str, Callable[[str], object]] = {
    "convert": lambda name: duotone.convert(two_linears(), name)[0].recipe,
    "convert_parameters": lambda name: duotone.convert_parameters(duotone.Linear(32, 32), name).recipe,
    "plan": lambda name: duotone.plan(duotone.Linear(32, 32, name="a"), name),
    "Linear": lambda name: duotone.Linear(32, 32, recipe=name).recipe,
    "LayerNormLinear": lambda name: duotone.LayerNormLinear(32, 32, recipe=name).recipe,
    "LayerNormMLP": lambda name: duotone.LayerNormMLP(32, 32, recipe=name).fc2.recipe,
    "GroupedLinear": lambda name: duotone.GroupedLinear(2, 32, 32, recipe=name).recipe,
    "MoE": lambda name: duotone.MoE(32, 32, 2, recipe=name).fc1.recipe,
    "DotProductAttention": lambda name: duotone.DotProductAttention(2, 16, recipe=name).recipe,
    "MultiheadAttention": lambda name: duotone.MultiheadAttention(32, 2, recipe=name).recipe,
    "TransformerLayer": lambda name: duotone.TransformerLayer(32, 32, 2, recipe=name).self_attention.recipe,
    "Quantize": lambda name: ops.Quantize(recipe=name).recipe,
    "BasicLinear": lambda name: ops.BasicLinear(32, 32, recipe=name).recipe,
    "RecipeState": lambda name: duotone.RecipeState.create(name, mode="forward", num_quantizers=3).recipe,
    "Phase": lambda name: Phase(name, 0),
    "Schedule": lambda name: Schedule((Phase(name, 0), Phase("bf16", 9))).at(3),
    "base": lambda name: RuleRecipe(rules=(), base=name),
    "evaluation": lambda name: recipes.NVFP4BlockScaling(evaluation=name),
    "align_size": recipes.align_size,
    "with_statistics": lambda name: observe.with_statistics(name, STORE),
}
STORE = observe.Tap()


@pytest.mark.parametrize("taker", TAKERS)
def test_a_name_stands_for_its_recipe(taker: str) -> None:
    take = TAKERS[taker]
    assert take("mxfp8") == take(MXFP8)
    with pytest.raises(duotone.RecipeError, match="recipe 'mxfp9' is unknown; did you mean mxfp8"):
        take("mxfp9")


@pytest.mark.parametrize("enter", [lambda name: duotone.autocast(name), lambda name: duotone.autocast(recipe=name)])
def test_autocast_takes_a_name(enter: Callable[[str], duotone.autocast]) -> None:
    module, x = duotone.Linear(32, 32), torch.randn(4, 32)
    with enter("mxfp8"):
        named = module(x)
    with enter(MXFP8):
        assert torch.equal(named, module(x))
    assert not torch.equal(named, module(x))


def test_quantized_model_init_takes_a_name() -> None:
    with duotone.quantized_model_init(recipe="mxfp8"):
        weight = duotone.Linear(32, 32).weight
    assert isinstance(weight, QuantizedTensor)
    assert weight.quantizer == MXFP8(recipes.QuantizerRole("linear", "weight"))


def test_a_recipe_inside_another_has_the_key_of_its_equal() -> None:
    assert RuleRecipe(rules=(), base="mxfp8").key == RuleRecipe(rules=(), base=MXFP8).key
    assert recipes.HighPrecision(evaluation="mxfp8").key == recipes.HighPrecision(evaluation=MXFP8).key


@pytest.mark.parametrize("kind", [str, Path])
def test_a_file_stands_for_its_recipe(kind: type, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("recipe = 'mxfp8'\nweight_2d = true\n")
    assert duotone.Linear(32, 32, recipe=kind(path)).recipe == recipes.MXFP8BlockScaling(weight_2d=True)


def test_a_name_in_traced_code() -> None:
    module, x = duotone.Linear(32, 32), torch.randn(4, 32)

    def under_name(x: torch.Tensor) -> torch.Tensor:
        with duotone.autocast("mxfp8"):
            return module(x)

    compiled = torch.compile(under_name, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), under_name(x))
