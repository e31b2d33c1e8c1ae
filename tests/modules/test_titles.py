"""Messages name a module by its full name in the model, also where nobody called `assign_names`."""

import gc
import re
import weakref

import pytest
import torch
from torch import nn

import duotone
from duotone import observe, recipes
from duotone.pipeline import titles
from later import Later

dynamo = Later("torch._dynamo")

K = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = duotone.Linear(K, K)
        self.mlp = duotone.LayerNormMLP(K, K)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.up(x))


def unnamed() -> nn.Sequential:
    return nn.Sequential(nn.Identity(), Block())


def test_errors_of_a_call_name_the_module_by_its_path() -> None:
    model = unnamed()
    with pytest.raises(duotone.UserError, match=r"^1\.up takes"):
        model(torch.randn(4, K + 1))
    with pytest.raises(dynamo.exc.Unsupported, match=r"UserError.*1\.up takes"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.randn(4, K + 1))
    with pytest.raises(duotone.UserError, match=r"^1\.up takes"):
        torch.compile(model, backend="eager")(torch.randn(4, K + 1))
    model[1].up = duotone.Linear(K, K + 1)  # type: ignore[union-attr]
    with pytest.raises(duotone.UserError, match=r"^1\.mlp takes \(\.\.\., 32\)"):
        model(torch.randn(4, K))
    attention = nn.Sequential(duotone.MultiheadAttention(K, 2))
    with pytest.raises(duotone.UserError, match=r"^0\.core_attention takes"):
        attention(torch.randn(K))


def test_the_path_begins_below_the_outermost_model_that_runs() -> None:
    inner, x = unnamed(), torch.randn(4, K + 1)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.encoder(x)

    outer = Outer()
    with pytest.raises(duotone.UserError, match=r"^encoder\.1\.up takes"):
        outer(x)
    with pytest.raises(duotone.UserError, match=r"^1\.up takes"):
        inner(x)
    with pytest.raises(duotone.UserError, match=r"^Layer_\d+ takes"):
        inner[1].up(x)  # type: ignore[union-attr]
    duotone.assign_names(outer)
    with pytest.raises(duotone.UserError, match=r"^encoder\.1\.up takes"):
        inner(x)


def test_errors_of_plans_and_tables_name_the_module_by_its_path() -> None:
    model = unnamed()
    rules = recipes.Rule(tensor_type="weight", format="mxfp8_e4m3"), recipes.Rule(format="identity")
    strict = recipes.RuleRecipe(rules=rules, strict=True)
    with pytest.raises(duotone.UserError, match=r"fprop of 1\.up "):
        duotone.plan(model, strict)
    with pytest.raises(duotone.UserError, match=r"fprop of 1\.up "), duotone.autocast(recipe=strict):
        model(torch.randn(4, K))
    rows = duotone.plan(model, "mxfp8").filter(gemm="fprop")
    assert [row.module for row in rows] == ["1.up", "1.mlp.fc1", "1.mlp.fc2"]


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-delayed"])
def test_a_monitor_names_modules_by_their_path(recipe, tmp_path) -> None:
    model, alarms = unnamed(), []
    x = torch.zeros(32, K)  # under delayed scaling an alarm names the slots that saw nothing
    with observe.Monitor(model, tmp_path / "run.jsonl", every=1, on_alarm=alarms.append) as monitor:
        for _ in range(2):
            with duotone.autocast(recipe=recipe):
                model(x).sum().backward()
            monitor.step()
    text = (tmp_path / "run.jsonl").read_text()
    assert set(re.findall(r'"module": "([^"]+)"', text)) == {"1.up", "1.mlp.fc1", "1.mlp.fc2"}
    assert "Layer_" not in text and "a linear" not in text and ("1.up, input" in text) == (recipe == "fp8-delayed")


def test_rules_by_place_refuse_children_of_a_module_without_a_name() -> None:
    """They were skipped without a word."""
    recipe = recipes.RuleRecipe(rules=(recipes.Rule(layer=0, format="mxfp8_e4m3"),))
    for child in (duotone.LayerNormMLP(K, K), duotone.MoE(K, K, 2)):
        model = nn.Sequential(child)
        with pytest.raises(duotone.RecipeError, match=r"call duotone\.assign_names"), duotone.autocast(recipe=recipe):
            model(torch.randn(4, K))


@pytest.mark.parametrize(
    ("module", "name", "pieces"),
    [
        (lambda: duotone.TransformerLayer(K, K, 2, fuse_qkv_params=False), "self_attention.layernorm_qkv", "query"),
        (lambda: duotone.LayerNormMLP(K, K, activation="swiglu", split_gate=True), "fc1", "gate"),
    ],
    ids=["attention", "gated MLP"],
)
def test_a_weight_in_pieces_that_should_be_quantized_is_an_error_in_the_users_words(module, name, pieces) -> None:
    """It named an option of a linear that the user of a TransformerLayer never saw."""
    words = rf"is stored as {pieces}_weight, .*fuse_qkv_params=True, an MLP without split_gate"
    model = nn.Sequential(module())
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(duotone.UserError, match=rf"^the weight of 0\.{name} {words}"):
        duotone.convert_parameters(model, "mxfp8")
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    with pytest.raises(duotone.UserError, match=words), duotone.quantized_model_init(recipe="mxfp8"):
        module()


def test_no_name_is_looked_for_without_a_message(monkeypatch) -> None:
    """A look through the running functions costs a walk of the model, and each plan of each linear would pay it."""
    looked = []
    monkeypatch.setattr(titles, "_path_in_call", lambda module: looked.append(module) or "")
    model, delayed = unnamed(), duotone.autocast(recipe="fp8-delayed")
    for region in (duotone.autocast(recipe="mxfp8"), delayed, duotone.autocast(recipe="bf16")):
        with region:
            model(torch.randn(32, K)).sum().backward()
    assert not looked
    with pytest.raises(duotone.UserError, match="takes"):
        model(torch.randn(4, K + 1))
    assert looked == [id(model[1].up)]  # type: ignore[union-attr]


def test_an_error_keeps_no_variable_of_a_function_alive() -> None:
    model = unnamed()
    with pytest.raises(duotone.UserError, match=r"^1\.up takes"):
        model(torch.randn(4, K + 1))
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
