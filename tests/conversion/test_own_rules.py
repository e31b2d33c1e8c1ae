"""Rules of the user go before the default ones, which stay for all that no rule decides."""

import warnings

import pytest
from torch import nn

import duotone
from duotone import observe, recipes
from duotone.recipes import OUTPUT_HEAD, Phase, Rule, RuleRecipe, Schedule

FIRST = Rule(module="first", format="identity")
DEFAULT = {"proj.lora_A", "proj.lora_B", "moe.gate", "lm_head"}
"""The linears of `model` that default rules keep in high precision."""

SCHEDULE = Schedule((Phase(recipes.load("nvfp4"), 0), Phase(recipes.load("mxfp8"), 10)))


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base_layer, self.lora_A = nn.Linear(64, 64), nn.Linear(64, 4, bias=False)
        self.lora_B = nn.Linear(4, 64, bias=False)


def model() -> nn.ModuleDict:
    moe = {"gate": nn.Linear(64, 4), "experts": nn.ModuleList(nn.Linear(64, 64) for _ in range(4))}
    parts = {"embed": nn.Embedding(100, 64), "first": nn.Linear(64, 64), "proj": Lora(), "moe": nn.ModuleDict(moe)}
    return nn.ModuleDict({**parts, "lm_head": nn.Linear(64, 100)})


def high(m: nn.Module) -> set[str]:
    """The linears that run in high precision."""
    return {row.module for row in duotone.plan(m) if row.runs == "high precision" and row.gemm == "fprop"}


WAYS = {
    "tuple": lambda m, rules: duotone.convert(m, "nvfp4", rules),
    "list": lambda m, rules: duotone.convert(m, "nvfp4", list(rules)),
    "with the default rules": lambda m, rules: duotone.convert(m, "nvfp4", (*OUTPUT_HEAD, *rules)),
    "schedule": lambda m, rules: duotone.convert(m, SCHEDULE.at(0), rules, schedule=SCHEDULE),
    "again": lambda m, rules: duotone.convert(duotone.convert(m, "mxfp8", ()), "nvfp4", rules),
    "fuse": lambda m, rules: duotone.convert(m, "nvfp4", rules, fuse=True),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_rule_leaves_heads_adapters_and_routers_in_high_precision(way) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fuse found")
        assert high(way(model(), (FIRST,))) == {"first", *DEFAULT}


def test_parameters_follow_the_rules_too() -> None:
    m = duotone.convert_parameters(duotone.convert(model(), "nvfp4", [FIRST]), "nvfp4")
    kept = {name for name, module in m.named_modules() if type(getattr(module, "weight", None)) is nn.Parameter}
    assert kept == {"embed", "first", *DEFAULT}


def test_no_rules_turn_the_default_ones_off() -> None:
    assert high(duotone.convert(model(), "nvfp4", ())) == high(duotone.convert(model(), "nvfp4", [])) == set()


@pytest.mark.parametrize("name", sorted(DEFAULT))
def test_a_rule_that_names_a_module_goes_before_the_default_one(name: str) -> None:
    named = Rule(module=name, format="mxfp8_e4m3")
    for rules in ((FIRST, named), (named, FIRST)):
        m = duotone.convert(model(), "nvfp4", rules)
        assert high(m) == {"first", *DEFAULT} - {name}
        assert {row.a for row in duotone.plan(m).filter(name)} == {"mxfp8_e4m3"}


def test_a_rule_for_one_tensor_leaves_the_others_to_the_default() -> None:
    rules = [Rule(tensor_type="grad_output", format="mxfp8_e5m2")]
    m = duotone.convert(model(), "mxfp8", rules)
    assert high(m) == DEFAULT and {row.runs for row in duotone.plan(m).filter("lm_head")} == {"high precision"}


def test_rules_of_a_recipe_go_before_the_default_ones_as_without_own_rules() -> None:
    names = ("proj.lora_A", "moe.gate")
    recipe = RuleRecipe(rules=tuple(Rule(module=name, format="mxfp8_e4m3") for name in names), base="nvfp4")
    assert high(duotone.convert(model(), recipe, [FIRST])) == {"first", *DEFAULT} - set(names)


def test_the_order_of_own_rules_is_that_of_the_user() -> None:
    """One of them may be equal to a default rule, and still comes first."""
    m = duotone.convert(model(), "nvfp4", [OUTPUT_HEAD[0], Rule(format="mxfp8_e4m3")])
    assert high(m) == {"lm_head"}


def test_advice_is_about_linears_that_the_default_rules_leave_to_recipes() -> None:
    assert set(observe.operand_samples.linears_of(model())) == {"first", "proj.base_layer", *EXPERTS}


EXPERTS = {f"moe.experts.{index}" for index in range(4)}
