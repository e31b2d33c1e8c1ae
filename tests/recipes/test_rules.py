"""Rules: what each condition matches, the formats they give, and the recipe that holds them."""

import re

import pytest
from torch import nn

import duotone
from duotone import recipes
from duotone.errors import RecipeError
from duotone.formats import get
from duotone.recipes import DelayedScaling, QuantizerRole, Rule, RuleRecipe, Site, first_match, unmatched
from duotone.tensor import History, Quantizer


def role(name="model.layers.3.mlp.up", kind="weight", module_type="linear"):
    return QuantizerRole(module_type, kind, name)


INPUT, WEIGHT, GRAD = (role(kind=kind) for kind in ("input", "weight", "grad_output"))
IDENTITY = {"format": "identity"}
FOLLOWING = {"columnwise_source": "rowwise_dequantized"}


def matched_layers(layer, layers=4):
    rule = Rule(layer=layer, **IDENTITY)
    return [i for i in range(layers) if rule.matches(WEIGHT, Site(layer=i, layers=layers))]


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (0, [0]),
        (-1, [3]),
        ("0", [0]),
        ("-2", [2]),
        ("0:2", [0, 1]),
        (":1", [0]),
        ("-2:", [2, 3]),
        ("1:-1", [1, 2]),
        (":", [0, 1, 2, 3]),
        (9, []),
        (-9, []),
        ("2:1", []),
    ],
)
def test_a_layer_is_an_index_or_a_range_from_either_end(layer, expected):
    assert matched_layers(layer) == expected


def test_a_layer_that_is_not_known_matches_no_condition_on_it():
    assert not Rule(layer=0, **IDENTITY).matches(WEIGHT)
    assert not Rule(layer=-1, **IDENTITY).matches(WEIGHT, Site(layer=3))
    assert Rule(layer="2:", **IDENTITY).matches(WEIGHT, Site(layer=3))


@pytest.mark.parametrize(
    ("condition", "matching"),
    [
        (">=64", [64, 96]),
        (">64", [96]),
        ("<=64", [32, 64]),
        ("<64", [32]),
        ("==64", [64]),
        ("!=64", [32, 96]),
        ("% 64", [64]),
        ("%32", [32, 64, 96]),
    ],
)
def test_sizes_compare_with_their_side_of_the_weight(condition, matching):
    sizes = (32, 64, 96)
    wide, tall = Rule(in_features=condition, **IDENTITY), Rule(out_features=condition, **IDENTITY)
    assert [n for n in sizes if wide.matches(INPUT, Site(shape=(7, n)))] == matching
    assert [n for n in sizes if tall.matches(GRAD, Site(shape=(n, 7)))] == matching
    assert not wide.matches(INPUT) and not tall.matches(INPUT)


def test_names_match_by_glob_or_by_a_regular_expression_on_the_whole_name():
    assert Rule(module="model.layers.*.up", **IDENTITY).matches(WEIGHT)
    assert not Rule(module="layers.*", **IDENTITY).matches(WEIGHT)
    assert Rule(module_regex=r"model\.layers\.[0-3]\..*", **IDENTITY).matches(WEIGHT)
    assert not Rule(module_regex=r"model\.layers\.[0-3]", **IDENTITY).matches(WEIGHT)
    assert Rule(module_type="*linear", **IDENTITY).matches(role(module_type="grouped_linear"))
    assert not Rule(module_type="linear", **IDENTITY).matches(role(module_type="grouped_linear"))


def test_all_conditions_of_a_rule_must_hold():
    rule = Rule(module="*.up", tensor_type="weight", layer="-2:", in_features=">=64", **IDENTITY)
    site = Site(layer=3, layers=4, shape=(16, 64))
    assert rule.matches(WEIGHT, site)
    assert not rule.matches(INPUT, site)
    assert not rule.matches(role("model.layers.3.mlp.down"), site)
    assert not rule.matches(WEIGHT, Site(layer=1, layers=4, shape=(16, 64)))
    assert not rule.matches(WEIGHT, Site(layer=3, layers=4, shape=(64, 16)))


@pytest.mark.parametrize("condition", [{"module": "*"}, {"module_regex": ".*"}, {"layer": 0}])
def test_a_rule_that_asks_for_the_place_of_an_unnamed_module_says_what_to_call(condition):
    rule = Rule(tensor_type="weight", **condition, **IDENTITY)
    with pytest.raises(RecipeError, match=r"asks for \w+, but .* call duotone.assign_names\(root\) first") as raised:
        rule.matches(WEIGHT, Site(named=False))
    assert next(iter(condition)) in str(raised.value) and "\n" not in str(raised.value)
    assert not rule.matches(INPUT, Site(named=False))
    assert Rule(tensor_type="weight", in_features="<9", **IDENTITY).matches(WEIGHT, Site(shape=(4, 8), named=False))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"module_regex": "layers.(0"}, "module_regex 'layers.(0' is no regular expression: missing )"),
        ({"layer": "first"}, "layer is 'first'; give an index or a range"),
        ({"layer": "0:4:2"}, "layer is '0:4:2'; give"),
        ({"layer": True}, "layer is True; give"),
        ({"layer": 0.5}, "layer is 0.5; give"),
        ({"in_features": "4096"}, "in_features is '4096'; give a comparison such as '>=4096'"),
        ({"out_features": "%0"}, "out_features is '%0'; give a comparison"),
        ({"out_features": 4096}, "out_features is 4096; every field of a rule is a string"),
        ({"module": 3}, "module is 3; every field of a rule is a string"),
        ({"tensor_type": "wieght"}, "tensor_type 'wieght' is unknown; allowed are 'input', 'weight'"),
        ({"columnwise_source": "row"}, "columnwise_source 'row' is unknown"),
        (
            FOLLOWING | {"tensor_type": "grad_output"},
            "encodes the columnwise plane of grad_output from its rowwise one",
        ),
        (FOLLOWING | {"tensor_type": "dp"}, "encodes the columnwise plane of dp from its rowwise one"),
        ({"module_type": "liner"}, "module_type 'liner' matches no module of Duotone, whose types are linear, "),
        ({"module_type": "Linear"}, "did you mean 'linear'?"),
        ({"module_type": "grouped-linear"}, "did you mean 'grouped_linear'?"),
    ],
)
def test_a_wrong_condition_is_refused_at_construction(fields, message):
    with pytest.raises(RecipeError, match=re.escape(message)) as raised:
        Rule(**fields, **IDENTITY)
    assert "\n" not in str(raised.value)


def test_a_rule_for_module_types_of_the_users_own_is_allowed_and_said():
    with pytest.warns(UserWarning, match="module_type 'conv2d' matches no module of Duotone"):
        rule = Rule(module_type="conv2d", **IDENTITY)
    assert rule.matches(role(module_type="conv2d"))


def test_gradients_never_follow_their_rowwise_plane():
    """Also where the rule names no tensor: it says so of the first gradient that it would decide."""
    rule = Rule(format="mxfp8_e4m3", **FOLLOWING)
    assert rule.quantizer(WEIGHT).columnwise_source == "rowwise_dequantized"
    with pytest.raises(RecipeError, match="grad_output from its rowwise one, which is for inputs and weights alone"):
        duotone.convert(nn.Linear(32, 32), RuleRecipe(rules=(rule,)))
    earlier = Rule(tensor_type="grad_output", format="mxfp8_e4m3")
    duotone.convert(nn.Linear(32, 32), RuleRecipe(rules=(earlier, rule)))


def test_a_rule_without_a_format_for_a_plane_of_attention_is_refused_without_a_gemm():
    with pytest.raises(RecipeError, match="names no format for s columnwise; add columnwise, or format"):
        Rule(tensor_type="s", rowwise="fp8_e4m3_tensor", fprop="nvfp4", wgrad="nvfp4")


def test_formats_per_gemm_concern_tensors_of_linears_alone():
    rule = Rule(fprop="identity", dgrad="mxfp8_e4m3", wgrad="nvfp4_rht")
    assert not rule.matches(QuantizerRole()) and not rule.matches(QuantizerRole("dpa", "qkv", "a"))
    options = {kind: rule.quantizer(role(kind=kind)) for kind in ("input", "weight", "grad_output")}
    assert options == {
        "input": Quantizer(get("identity"), get("nvfp4_rht")),
        "weight": Quantizer(get("identity"), get("mxfp8_e4m3")),
        "grad_output": Quantizer(get("mxfp8_e4m3"), get("nvfp4_rht")),
    }


def test_the_first_rule_that_matches_decides_at_the_site():
    rules = (Rule(layer=0, **IDENTITY), Rule(in_features="%32", format="nvfp4"), Rule(format="mxfp8_e4m3"))
    recipe = RuleRecipe(rules=rules)
    sites = [Site(0, 2, (32, 32)), Site(1, 2, (32, 64)), Site(1, 2, (32, 40))]
    assert [recipe.quantizer(WEIGHT, site).rowwise.name for site in sites] == ["identity", "nvfp4", "mxfp8_e4m3"]
    assert recipe(WEIGHT).rowwise.name == "mxfp8_e4m3"
    assert first_match(rules[:1], WEIGHT) is None and first_match(rules[:1], WEIGHT, sites[0]) == Quantizer()


def test_the_rules_that_decide_nothing_are_told():
    rules = (
        Rule(module="*.typo", **IDENTITY),
        Rule(layer=-1, **IDENTITY),
        Rule(format="mxfp8_e4m3"),
        Rule(module="*.up", format="nvfp4"),  # an earlier one takes all
    )
    subjects = [(role(kind=kind), Site(i, 2, (8, 8))) for kind in ("input", "weight") for i in range(2)]
    assert unmatched(rules, [*subjects, (None, Site())]) == [rules[0], rules[3]]
    assert unmatched(rules, []) == list(rules)


def test_roles_that_no_rule_matches_get_what_the_base_gives():
    recipe = RuleRecipe(rules=(Rule(layer="-2:", **IDENTITY),), base=recipes.load("nvfp4"), strict=True)
    last, first = Site(3, 4, (16, 16)), Site(0, 4, (16, 16))
    assert recipe.quantizer(WEIGHT, last) == Quantizer()
    assert recipe.quantizer(WEIGHT, first) == recipes.load("nvfp4")(WEIGHT)
    nested = RuleRecipe(rules=(Rule(layer=0, format="mxfp8_e4m3"),), base=recipe, strict=True)
    assert nested.quantizer(WEIGHT, first).rowwise.name == "mxfp8_e4m3"
    assert nested.quantizer(WEIGHT, last) == Quantizer()


def test_a_boundary_slot_matches_no_rule():
    """hybrid 77: without a consumer a slot stays in high precision, or gets what the base gives."""
    rules = (Rule(format="mxfp8_e4m3"),)
    assert RuleRecipe(rules=rules, strict=True).quantizer(None) == Quantizer()
    assert RuleRecipe(rules=rules, base=recipes.load("nvfp4")).quantizer(None).rowwise.name == "nvfp4"


def test_strict_refuses_a_role_that_nothing_decides():
    recipe = RuleRecipe(rules=(Rule(tensor_type="input", format="mxfp8_e4m3"),), strict=True, title="mine")
    with pytest.raises(RecipeError, match="strict: no rule of recipe mine matches module_type=linear"):
        recipe(WEIGHT)


@pytest.mark.parametrize(
    "field",
    [
        {"backward_override": "dequantized"},
        {"strict": True},
        {"emulate_mixed": True},
        {"fprop_fast_accum": False},
        {"dgrad_fast_accum": True},
        {"wgrad_fast_accum": True},
        {"min_weight_elements": 4096},
        {"evaluation": recipes.load("bf16")},
    ],
)
def test_a_base_whose_other_fields_would_be_lost_is_refused(field):
    base = recipes.MXFP8BlockScaling(**field)
    name = next(iter(field))
    with pytest.raises(
        RecipeError, match=rf"base mxfp8( \({name} = .*\))? has {name}, and a base gives quantizers alone"
    ):
        RuleRecipe(rules=(), base=base)
    assert RuleRecipe(rules=(), base=base, **field)(WEIGHT) == base(WEIGHT)


def test_the_history_of_a_recipe_goes_to_its_delayed_formats_alone():
    """hybrid 84: delayed scaling in a single direction, beside formats without state."""
    rules = (
        Rule(tensor_type="weight", rowwise="fp8_e4m3_delayed", columnwise="mxfp8_e4m3"),
        Rule(tensor_type="input", format="fp8_e4m3_delayed"),
        Rule(format="fp8_e5m2_tensor"),
    )
    history = History(margin=1, amax_history_len=4)
    recipe = RuleRecipe(rules=rules, history=history)
    assert recipe(WEIGHT) == Quantizer(get("fp8_e4m3_delayed"), get("mxfp8_e4m3"), history=history)
    assert recipe(INPUT) == DelayedScaling(margin=1, amax_history_len=4)(INPUT)
    assert recipe(GRAD).history is None
    assert RuleRecipe(rules=rules)(INPUT) == DelayedScaling()(INPUT)
    assert first_match(rules, INPUT) == DelayedScaling()(INPUT)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rules": [Rule(**IDENTITY)]}, "give a tuple of duotone.recipes.Rule"),
        ({"rules": ("mxfp8",)}, "rules is ('mxfp8',); give a tuple"),
        ({"rules": (), "title": 3}, "title is 3; it must be a string"),
        ({"rules": (), "base": 8}, "base takes a recipe or its name; got int"),
        ({"rules": (), "history": {"margin": 1}}, "history is {'margin': 1}; give a duotone.tensor.History"),
        ({"rules": (), "evaluation": 16}, "evaluation takes a recipe or its name; got int"),
        (
            {"rules": (), "evaluation": recipes.MXFP8BlockScaling(evaluation=recipes.HighPrecision())},
            "the evaluation recipe mxfp8 (evaluation = bf16) has an evaluation recipe itself; leave that out",
        ),
    ],
)
def test_wrong_fields_of_a_recipe_are_refused_at_construction(fields, message):
    with pytest.raises(RecipeError, match=re.escape(message)):
        RuleRecipe(**fields)
