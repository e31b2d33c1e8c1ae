"""Low-rank adapters in a model before convert stay in high precision; the linears beside them do not."""

import pytest
import torch
from torch import Tensor, nn

import duotone
from duotone import recipes
from duotone.recipes import OUTPUT_HEAD, Rule, RuleRecipe

MXFP8 = recipes.load("mxfp8")


class Lora(nn.Module):
    """As PEFT's layer for a linear: it holds the linear and, by the name of the adapter, two of rank 8."""

    def __init__(self, linear: nn.Linear, rank: int = 8, names: tuple[str, str] = ("lora_A", "lora_B")) -> None:
        super().__init__()
        self.base_layer, self.names = linear, names
        for name, sizes in zip(names, ((linear.in_features, rank), (rank, linear.out_features)), strict=True):
            setattr(self, name, nn.ModuleDict({"default": nn.Linear(*sizes, bias=False)}))

    def forward(self, x: Tensor) -> Tensor:
        down, up = (getattr(self, name)["default"] for name in self.names)
        return self.base_layer(x) + up(down(x))


def adapted(**options: object) -> nn.ModuleDict:
    blocks = [nn.ModuleDict({"up": Lora(nn.Linear(64, 64), **options), "down": nn.Linear(64, 64)}) for _ in range(2)]
    return nn.ModuleDict({"layers": nn.ModuleList(blocks)})


def first_operands(model: nn.Module) -> dict[str, tuple[str, str]]:
    return {row.module: (row.a, row.reason) for row in duotone.plan(model) if row.gemm == "fprop"}


def test_adapters_stay_in_high_precision_with_a_row_that_says_why() -> None:
    m = duotone.convert(adapted(), MXFP8)
    result = first_operands(m)
    assert {name for name, (fmt, _) in result.items() if fmt == "identity"} == {
        f"layers.{layer}.up.{part}.default" for layer in range(2) for part in ("lora_A", "lora_B")
    }
    assert result["layers.0.up.lora_A.default"][1].startswith("a low-rank adapter of rank 8: kept in high precision")
    assert result["layers.1.up.base_layer"][0] == result["layers.1.down"][0] == "mxfp8_e4m3"


def test_the_product_of_an_adapter_has_the_bits_of_high_precision() -> None:
    m, x = adapted(), torch.randn(16, 64)
    adapter = m["layers"][0]["up"].lora_A["default"]
    before = adapter(x)
    duotone.convert(m, MXFP8)
    assert torch.equal(adapter(x), before)


def test_two_small_linears_beside_one_of_their_product_are_an_adapter_whatever_they_are_called() -> None:
    result = first_operands(duotone.convert(adapted(names=("first", "second")), MXFP8))
    assert {name for name, (fmt, _) in result.items() if fmt == "identity"} == {
        f"layers.{layer}.up.{part}.default" for layer in range(2) for part in ("first", "second")
    }


def test_linears_that_are_small_in_other_ways_are_no_adapters() -> None:
    """One after the other, without one of their product beside them, or of half the size."""
    bottleneck = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8), nn.Linear(8, 64))
    grouped = nn.ModuleDict({"q": nn.Linear(64, 64), "k": nn.Linear(64, 16), "v": nn.Linear(64, 16)})
    m = nn.ModuleDict({"bottleneck": bottleneck, "attention": grouped, "wide": adapted(rank=32, names=("a", "b"))})
    assert {fmt for fmt, _ in first_operands(duotone.convert(m, MXFP8)).values()} == {"mxfp8_e4m3"}


def test_a_layer_of_peft_is_told_by_where_its_class_comes_from() -> None:
    """Of one that keeps its linear elsewhere, the small linears are adapters and the linears of the model are not."""
    m = adapted(names=("first", "second"))
    layer = m["layers"][0]["up"]
    layer.__class__ = type("Layer", (Lora,), {"__module__": "peft.tuners.some.layer"})
    layer.base_layer = nn.ModuleDict({"up": nn.Linear(64, 256), "down": nn.Linear(256, 64)})
    saved = {name for name, (fmt, _) in first_operands(duotone.convert(m, MXFP8)).items() if fmt == "identity"}
    assert {name for name in saved if ".0." in name} == {"layers.0.up.first.default", "layers.0.up.second.default"}


@pytest.mark.parametrize(
    ("recipe", "rules"),
    [
        (MXFP8, (Rule(module="*.lora_A.*", format="fp8_e4m3_row"),)),
        (RuleRecipe(rules=(Rule(module="*.lora_A.*", format="fp8_e4m3_row"),), base=MXFP8), OUTPUT_HEAD),
    ],
    ids=["of convert", "of the recipe"],
)
def test_a_rule_overrides_it(recipe, rules) -> None:
    result = first_operands(duotone.convert(adapted(), recipe, rules=rules))
    assert result["layers.0.up.lora_A.default"][0] == "fp8_e4m3_row"
    assert result["layers.0.up.lora_B.default"][0] == "identity"
