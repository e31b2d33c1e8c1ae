"""convert, revert and plan: in place, reversible, and honest about what stays in high precision."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import duotone
from duotone import formats, recipes
from duotone.errors import RecipeError, UserError
from duotone.recipes import Rule


class OwnForward(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class Plain(nn.Linear):
    """A subclass without a forward of its own."""


def model() -> nn.Module:
    return nn.ModuleDict(
        {
            "embedding": nn.Embedding(8, 32),
            "first": nn.Linear(32, 32),
            "own": OwnForward(32, 32),
            "plain": Plain(32, 32),
            "attention": nn.MultiheadAttention(32, 2),
            "lm_head": nn.Linear(32, 8),
        }
    )


def test_convert_keeps_parameters_names_and_state_dict_keys() -> None:
    m = model()
    keys, parameters = list(m.state_dict()), dict(m.named_parameters())
    assert duotone.convert(m, recipes.load("nvfp4")) is m
    assert list(m.state_dict()) == keys
    assert all(p is parameters[name] for name, p in m.named_parameters())
    assert isinstance(m["first"], nn.Linear) and isinstance(m["plain"], Plain)
    m.load_state_dict(model().state_dict())


def test_revert_restores_classes_and_leaves_nothing_behind() -> None:
    m = model()
    kinds = [type(module) for module in m.modules()]
    attributes = [set(vars(module)) for module in m.modules()]
    buffers = [set(module._buffers) for module in m.modules()]
    duotone.revert(duotone.convert(m, recipes.load("mxfp8")))
    assert [type(module) for module in m.modules()] == kinds
    assert [set(vars(module)) for module in m.modules()] == attributes
    assert [set(module._buffers) for module in m.modules()] == buffers


class HuggingFaceAttention(nn.Module):
    """What conversion reads of an attention module of transformers."""

    num_key_value_groups = 1

    def __init__(self) -> None:
        super().__init__()
        self.is_causal = True
        self.config = SimpleNamespace(_attn_implementation="duotone", num_attention_heads=2, hidden_size=32)
        self.q_proj = nn.Linear(32, 32)


def test_revert_takes_the_attention_away_that_convert_added() -> None:
    m = nn.Sequential(HuggingFaceAttention())
    names = [name for name, _ in m.named_modules()]
    duotone.convert(m, "nvfp4-linear-fp8-dpa")
    assert [name for name, _ in m.named_modules()] != names
    assert [name for name, _ in duotone.revert(m).named_modules()] == names


def test_plan_shows_each_gemm_and_why_the_rest_stays() -> None:
    m = duotone.convert(model(), recipes.load("mxfp8"))
    rows = {(row.module, row.gemm): row for row in duotone.plan(m)}
    assert rows["embedding", "-"].reason == "an embedding is a look-up, not a GEMM"
    assert rows["own", "-"].reason == "OwnForward has a forward of its own"
    assert "without calling" in rows["attention.out_proj", "-"].reason
    for gemm in ("fprop", "dgrad", "wgrad"):
        assert (rows["first", gemm].a, rows["plain", gemm].b) == ("mxfp8_e4m3", "mxfp8_e4m3")
        assert not rows["first", gemm].native and "no native rule" in rows["first", gemm].reason
        head = rows["lm_head", gemm]
        assert (head.a, head.b, head.native, head.reason) == (
            "identity",
            "identity",
            True,
            "kept in high precision by a rule",
        )


def test_plan_follows_the_recipe_given_for_it() -> None:
    m = duotone.convert(model(), recipes.load("mxfp8"))
    rows = {(row.module, row.gemm): row for row in duotone.plan(m, recipes.load("nvfp4"))}
    assert (rows["first", "wgrad"].a, rows["first", "wgrad"].b) == ("nvfp4_rht_sr", "nvfp4_rht")
    assert rows["lm_head", "fprop"].a == "identity"


def test_subclasses_with_a_forward_of_their_own_keep_it() -> None:
    m = model()
    x = torch.randn(4, 32)
    before = m["own"](x)
    duotone.convert(m, recipes.load("mxfp8"))
    assert torch.equal(m["own"](x), before)


def test_user_rules_go_before_the_recipe_and_before_autocast() -> None:
    m = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    duotone.convert(m, recipes.load("mxfp8"), rules=[Rule(module="1", format="fp8_e4m3_row")])
    for enclosing in (None, recipes.load("nvfp4")):
        formats = {(row.module, row.gemm): row.a for row in duotone.plan(m, enclosing)}
        assert formats["1", "fprop"] == "fp8_e4m3_row"
    assert formats["0", "fprop"] == "nvfp4"


def test_strict_refuses_what_would_stay_in_high_precision_and_changes_nothing() -> None:
    m = model()
    with pytest.raises(RecipeError, match="strict: own stays in high precision: OwnForward"):
        duotone.convert(m, recipes.MXFP8BlockScaling(strict=True))
    assert type(m["first"]) is nn.Linear
    one_sided = recipes.RuleRecipe(
        rules=(Rule(tensor_type="input", format="mxfp8_e4m3"), Rule(format="identity")), strict=True
    )
    with pytest.raises(RecipeError, match="fprop of 0 pairs mxfp8_e4m3 with identity"):
        duotone.convert(nn.Sequential(nn.Linear(32, 32)), one_sided)


def test_wrong_arguments_are_one_line_errors() -> None:
    for call in (
        lambda: duotone.convert(model(), b"mxfp8"),
        lambda: duotone.convert(model(), "mxfp9"),
        lambda: duotone.convert(model(), recipes.load("mxfp8"), ["x"]),
    ):
        with pytest.raises(UserError) as raised:
            call()
        assert "\n" not in str(raised.value)
    m = duotone.convert(nn.Linear(32, 32), recipes.load("mxfp8"))
    for bad in (torch.randn(4, 16), torch.randn(4, 32).double(), torch.tensor(1.0)):
        with pytest.raises(UserError, match=r"takes (a tensor )?\((\.\.\., 32|\*lead, width)\)"):
            m(bad)
    assert m(torch.randn(4, 32)).shape == (4, 32)


def test_converted_models_deepcopy_and_pickle() -> None:
    m = duotone.convert(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), recipes.load("mxfp8"))
    x = torch.randn(4, 32)
    expected = m(x)
    for twin in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert torch.equal(twin(x), expected)


def test_converting_again_changes_the_recipe_and_keeps_the_seeds() -> None:
    m = duotone.convert(nn.Sequential(nn.Linear(32, 32)), recipes.load("nvfp4"))
    seeds = duotone.rng_state(m)
    duotone.convert(m, recipes.load("mxfp8"))
    assert {row.a for row in duotone.plan(m)} == {"mxfp8_e4m3"}
    assert all(torch.equal(seeds[name], value) for name, value in duotone.rng_state(m).items())


def test_torch_autocast_casts_as_it_does_for_nn_linear() -> None:
    m = nn.Linear(32, 32)
    x = torch.randn(4, 32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = m(x)
        duotone.convert(m, recipes.load("bf16"))
        result = m(x)
    assert result.dtype == torch.bfloat16 and torch.equal(result, expected)
    result.sum().backward()
    assert m.weight.grad.dtype == torch.float32


def test_second_derivatives_are_refused_instead_of_losing_terms() -> None:
    m = duotone.convert(nn.Linear(32, 32), recipes.load("mxfp8"))
    x = torch.randn(4, 32).requires_grad_()
    (grad,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
    with pytest.raises(UserError, match="no second derivative"):
        grad.square().sum().backward()


def test_float64_is_refused_at_convert_unless_nothing_is_quantized() -> None:
    m = nn.Linear(32, 32).double()
    with pytest.raises(RecipeError, match=r"is in torch.float64; formats encode"):
        duotone.convert(m, recipes.load("mxfp8"))
    assert type(m) is nn.Linear
    assert duotone.convert(m, recipes.load("bf16"))(torch.randn(4, 32).double()).dtype == torch.float64


def test_converted_subclasses_pickle() -> None:
    m = duotone.convert(nn.Sequential(Plain(32, 32)), recipes.load("mxfp8"))
    x = torch.randn(4, 32)
    unpickled = pickle.loads(pickle.dumps(m))
    assert torch.equal(unpickled(x), m(x)) and isinstance(unpickled[0], Plain)
    assert type(duotone.revert(unpickled)[0]) is Plain


def test_converting_in_inference_mode_leaves_a_model_that_trains() -> None:
    m = nn.Linear(32, 32)
    with torch.inference_mode():
        duotone.convert(m, recipes.load("nvfp4"))
    m(torch.randn(4, 32)).sum().backward()
    assert m.weight.grad is not None


def test_strict_rules_that_match_nothing_are_an_error() -> None:
    rules = (Rule(module="layer.0.*", format="mxfp8_e4m3"),)
    with pytest.raises(RecipeError, match="strict: no rule of recipe rules matches"):
        duotone.convert(nn.Sequential(nn.Linear(32, 32)), recipes.RuleRecipe(rules=rules, strict=True))


def test_rules_that_match_nothing_are_a_warning_and_a_plan_row() -> None:
    """Rules by type alone, and the default rules of convert, are for models in general and are not reported."""
    rules = (Rule(module="layer.0.*", format="mxfp8_e4m3"), Rule(module_type="grouped_linear", format="nvfp4"))
    recipe = recipes.RuleRecipe(rules=rules)
    m = nn.Sequential(nn.Linear(32, 32))
    with pytest.warns(UserWarning, match=r"'layer.0.\*', .* matches no tensor of the model"):
        duotone.convert(m, recipe)
    reasons = {row.module: row.reason for row in duotone.plan(m)}
    assert "layer.0.*" in reasons["a rule"] and set(reasons) == {"0", "a rule"}
    assert reasons["0"] == "the recipe keeps both operands in high precision"
    narrow = (Rule(module="1", format="identity"),)
    with pytest.warns(UserWarning, match="'module': '1'"):
        duotone.convert(m, recipes.load("mxfp8"), narrow)
    strict = recipes.MXFP8BlockScaling(strict=True)
    with pytest.raises(RecipeError, match=r"strict: the rule .* matches no tensor"):
        duotone.convert(m, strict, narrow)
    assert m[0].recipe == recipes.load("mxfp8")


def test_mixed_formats_that_no_hardware_multiplies_are_an_error_that_names_both_slots() -> None:
    """hybrid 56; emulate_mixed makes them a visible row."""
    rules = (Rule(tensor_type="weight", format="nvfp4"), Rule(format="mxfp8_e4m3"))
    m = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(RecipeError, match=r"input rowwise with weight rowwise: mxfp8_e4m3 .* with nvfp4"):
        duotone.convert(m, recipes.RuleRecipe(rules=rules))
    assert type(m[0]) is nn.Linear
    duotone.convert(m, recipes.RuleRecipe(rules=rules, emulate_mixed=True))
    rows = {row.gemm: row for row in duotone.plan(m)}
    assert "mixed formats" in rows["fprop"].reason and "mixed formats" in rows["dgrad"].reason
    assert "mixed" not in rows["wgrad"].reason and not rows["fprop"].native
    x = torch.randn(8, 32)
    row, weight = formats.get("mxfp8_e4m3").encode(x), formats.get("nvfp4").encode(m[0].weight.detach())
    exact = (
        formats.get("mxfp8_e4m3").decode(row, torch.float64) @ formats.get("nvfp4").decode(weight, torch.float64).t()
    )
    assert torch.allclose(m(x).double(), exact + m[0].bias.double(), rtol=1e-5, atol=1e-5)


def test_an_evaluation_recipe_applies_where_training_is_off() -> None:
    recipe = recipes.MXFP8BlockScaling(evaluation=recipes.load("nvfp4"))
    m = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    twin = copy.deepcopy(m)
    duotone.convert(m, recipe)
    x = torch.randn(8, 32)
    expected = {}
    for name in ("mxfp8", "nvfp4"):
        expected[name] = duotone.convert(copy.deepcopy(twin), recipes.load(name))(x)
    assert torch.equal(m(x), expected["mxfp8"])
    assert torch.equal(m.eval()(x), expected["nvfp4"])
    with duotone.autocast(recipe=recipe):
        assert torch.equal(m(x), expected["nvfp4"]) and torch.equal(m.train()(x), expected["mxfp8"])
    m[1].eval()
    assert not torch.equal(m(x), expected["mxfp8"]) and not torch.equal(m(x), expected["nvfp4"])


BAD_PAIR = recipes.RuleRecipe(rules=(Rule(tensor_type="input", format="nvfp4"), Rule(format="mxfp8_e4m3")))
NOWHERE = recipes.RuleRecipe(rules=(Rule(module="nonexistent.*", format="identity"),), base=recipes.load("mxfp8"))


def test_an_evaluation_recipe_is_checked_when_the_model_is_converted() -> None:
    m = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(RecipeError, match=r"nvfp4 .* with mxfp8_e4m3"):
        duotone.convert(m, recipes.MXFP8BlockScaling(evaluation=BAD_PAIR))
    assert type(m[0]) is nn.Linear
    mx = recipes.load("mxfp8")
    duotone.convert_parameters(duotone.convert(m, mx), mx)
    other = recipes.MXFP8BlockScaling(evaluation=recipes.load("nvfp4"))
    for change in (duotone.convert, duotone.convert_parameters):
        with pytest.raises(RecipeError, match=r"held in mxfp8_e4m3 and recipe nvfp4 asks"):
            change(m, other)
    assert m[0].recipe == mx
    duotone.convert_parameters(m, recipes.MXFP8BlockScaling(evaluation=recipes.load("bf16")))


@pytest.mark.parametrize(
    "recipe",
    [
        recipes.MXFP8BlockScaling(evaluation=NOWHERE),
        recipes.Schedule(phases=(recipes.Phase(recipes.load("mxfp8"), 0), recipes.Phase(NOWHERE, 5))),
        recipes.RuleRecipe(rules=(Rule(module="0", format="identity"),), base=NOWHERE),
    ],
    ids=["evaluation", "phase", "base"],
)
def test_rules_that_match_nothing_are_found_wherever_they_are(recipe) -> None:
    with pytest.warns(UserWarning, match=r"nonexistent.* matches no tensor of the model"):
        m = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        if isinstance(recipe, recipes.Schedule):
            duotone.convert(m, recipe.at(0), schedule=recipe)
        else:
            duotone.convert(m, recipe)


def test_parameters_of_a_parametrized_module_are_not_converted() -> None:
    m = nn.Sequential(nn.Linear(32, 32))
    nn.utils.parametrizations.weight_norm(m[0])
    duotone.convert(m, recipes.load("mxfp8"))
    with pytest.raises(UserError, match="the weight of 0 is parametrized"):
        duotone.convert_parameters(m, recipes.load("mxfp8"))


def test_a_schedule_is_checked_phase_by_phase() -> None:
    """A phase that would change the format of a quantized parameter is refused unless it converts parameters."""
    mx, nv = recipes.load("mxfp8"), recipes.load("nvfp4")
    m = duotone.convert_parameters(duotone.convert(nn.Sequential(nn.Linear(32, 32)), mx), mx)
    schedule = recipes.Schedule(phases=(recipes.Phase(mx, 0), recipes.Phase(nv, 5)))
    with pytest.raises(RecipeError, match=r"held in mxfp8_e4m3 and recipe nvfp4 asks .* duotone.convert_parameters"):
        duotone.convert(m, mx, schedule=schedule)
    converting = recipes.Schedule(phases=(recipes.Phase(mx, 0), recipes.Phase(nv, 5, convert_parameters=True)))
    duotone.convert(m, mx, schedule=converting)
    assert m[0].recipe == mx
    for step in (4, 5):
        phase = converting.phase(step)
        if phase.convert_parameters:
            duotone.convert_parameters(m, phase.recipe)
        with duotone.autocast(recipe=phase.recipe):
            m(torch.randn(4, 32)).sum().backward()
    assert m[0].weight.planes.rowwise.format.name == "nvfp4_16x16"
    plain = duotone.convert(nn.Sequential(nn.Linear(32, 32)), mx, schedule=schedule)
    assert plain[0].recipe == mx


def test_a_forward_that_was_replaced_on_the_instance_is_left_alone() -> None:
    m = nn.Sequential(nn.Linear(32, 32))
    m[0].forward = lambda x: x
    with pytest.warns(UserWarning, match=r"left alone: 0 \(its forward was replaced on the instance by "):
        duotone.convert(m, recipes.load("mxfp8"))
    (row,) = duotone.plan(m)
    assert row.gemm == "-" and "replaced on the instance" in row.reason
    x = torch.randn(4, 32)
    assert m(x) is x


def test_revert_refuses_a_module_that_was_parametrized_since_and_changes_nothing() -> None:
    m = duotone.convert(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), recipes.load("mxfp8"))
    nn.utils.parametrizations.weight_norm(m[1])
    with pytest.raises(UserError, match="1 was parametrized after it was converted"):
        duotone.revert(m)
    assert isinstance(m[0], duotone.Linear)
    nn.utils.parametrize.remove_parametrizations(m[1], "weight")
    duotone.revert(m)
    assert [type(layer) for layer in m] == [nn.Linear, nn.Linear]


def test_an_encoder_layer_shows_what_became_of_its_fast_path() -> None:
    m = duotone.convert(nn.TransformerEncoderLayer(32, 2, 64), recipes.load("mxfp8"))
    assert any("fast path" in row.reason for row in duotone.plan(m))
