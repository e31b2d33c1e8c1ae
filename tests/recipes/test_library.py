"""Recipes by name and from files: round trips, and one-line refusals."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from duotone import recipes
from duotone.errors import RecipeError
from duotone.recipes import QuantizerRole, Site
from duotone.recipes.roles import TENSORS_OF_MODULES
from duotone.tensor import History

ROLES = [QuantizerRole("linear", kind, "a.b") for kind in ("input", "weight", "grad_output")]


@pytest.mark.parametrize("name", recipes.names())
def test_recipes_are_values_and_survive_json_and_pickle(name: str) -> None:
    recipe = recipes.load(name)
    assert recipe.name == name
    assert recipe == recipes.load(name) and hash(recipe) == hash(recipes.load(name))
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    reloaded = recipes.from_dict(json.loads(json.dumps(recipe.to_dict())))
    assert reloaded == recipe and [reloaded(role) for role in ROLES] == [recipe(role) for role in ROLES]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fp8-current", ["fp8_e4m3_tensor", "fp8_e4m3_tensor", "fp8_e5m2_tensor"]),
        ("fp8-rowwise", ["fp8_e4m3_row", "fp8_e4m3_row", "fp8_e4m3_row"]),
        ("fp8-block", ["fp8_e4m3_1x128", "fp8_e4m3_128x128", "fp8_e4m3_1x128"]),
        ("mxfp8", ["mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e4m3"]),
        ("nvfp4", ["nvfp4/nvfp4_rht", "nvfp4_16x16", "nvfp4_sr/nvfp4_rht_sr"]),
        ("mxfp8-fwd-nvfp4-bwd", ["mxfp8_e4m3/nvfp4_rht", "mxfp8_e4m3/nvfp4", "nvfp4_sr/nvfp4_rht_sr"]),
        ("mxfp8-fwd-bf16-bwd", ["mxfp8_e4m3/identity", "mxfp8_e4m3/identity", "identity"]),
        ("bf16", ["identity", "identity", "identity"]),
    ],
)
def test_built_in_recipes_give_each_role_its_formats(name: str, expected: list[str]) -> None:
    quantizers = [recipes.load(name)(role) for role in ROLES]
    result = ["/".join(dict.fromkeys((q.rowwise.name, q.columnwise.name))) for q in quantizers]
    assert result == expected


def test_a_file_of_rules_decides_by_first_match(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        """
        strict = true
        [[rules]]
        module = "a.*"
        tensor_type = "weight"
        rowwise = "mxfp8_e4m3"
        dgrad = "nvfp4"
        columnwise_source = "rowwise_dequantized"
        [[rules]]
        fprop = "mxfp8_e4m3"
        dgrad = "identity"
        wgrad = "fp8_e4m3_row"
        """
    )
    recipe = recipes.load(str(path))
    assert (recipe.name, recipe.strict) == ("mine", True)
    weight = recipe(ROLES[1])
    assert (weight.rowwise.name, weight.columnwise.name) == ("mxfp8_e4m3", "nvfp4")
    assert weight.columnwise_source == "rowwise_dequantized"
    other = recipe(QuantizerRole("linear", "weight", "b"))
    assert (other.rowwise.name, other.columnwise.name) == ("mxfp8_e4m3", "identity")
    grad = recipe(ROLES[2])
    assert (grad.rowwise.name, grad.columnwise.name) == ("identity", "fp8_e4m3_row")


def test_a_file_may_change_fields_of_a_built_in_recipe(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"recipe": "nvfp4", "disable_rht": True, "backward_override": "dequantized"}))
    assert recipes.load(str(path)) == recipes.NVFP4BlockScaling(disable_rht=True, backward_override="dequantized")


def test_wgrad_input_128x128_changes_the_columnwise_plane_of_the_input_alone(tmp_path: Path) -> None:
    path = tmp_path / "square.toml"
    path.write_text("recipe = 'fp8-block'\nwgrad_input_128x128 = true\npower_of_two_scales = false\namax_epsilon = 0.5")
    recipe = recipes.load(str(path))
    assert recipe == recipes.from_dict(recipe.to_dict()) != recipes.Float8BlockScaling(power_of_two_scales=False)
    results = [recipe(role) for role in ROLES]
    line, square = "fp8_e4m3_1x128_fp32_eps0.5", "fp8_e4m3_128x128_fp32_eps0.5"
    assert [(q.rowwise.name, q.columnwise.name) for q in results] == [(line, square), (square, square), (line, line)]
    assert {q.columnwise_source for q in results} == {"original"}
    elsewhere = recipe(QuantizerRole("dpa", "qkv", "a.b")), recipe(None)
    assert {(q.rowwise.name, q.columnwise.name) for q in elsewhere} == {(line, line)}


def test_a_role_that_no_rule_matches_stays_in_high_precision(tmp_path: Path) -> None:
    recipe = recipes.RuleRecipe(rules=(recipes.Rule(tensor_type="input", format="mxfp8_e4m3"),))
    assert recipe(ROLES[1]).rowwise.name == "identity"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs [[rules]]"),
        ("rules = []", "at least one rule"),
        ("rule = 3", "no key 'rule'; allowed are name, strict, backward_override"),
        ("[[rules]]\nformt = 'mxfp8_e4m3'", "rule 1 has no key 'formt'; allowed are module"),
        ("[[rules]]\nformat = 'mxfp9'", "format 'mxfp9' is unknown; did you mean"),
        ("[[rules]]\nformat = 'NVFP4'", "format 'NVFP4' is unknown; did you mean nvfp4,"),
        ("[[rules]]\nformat = 'bf16'", "format 'bf16' is unknown; identity is high precision,"),
        (
            "[[rules]]\nfprop = 'mxfp8_e4m3'",
            "names no format for input columnwise; add columnwise, wgrad or format",
        ),
        ("[[rules]]\nformat = 3", "rule 1: format is 3; every field of a rule is a string"),
        (
            "[[rules]]\ntensor_type = 'wieght'\nformat = 'mxfp4'",
            "tensor_type 'wieght' is unknown; allowed are 'input'",
        ),
        ("recipe = 'mxfp8'\nmargin = 0", "recipe mxfp8 has no key 'margin'; allowed are"),
        ("recipe = 'mxfp9'", "recipe 'mxfp9' is unknown; allowed are bf16"),
        ("recipe = 'mxfp8'\nbackward_override = 'bf16'", "backward_override 'bf16' is unknown"),
        ("recipe = 'mxfp8'\nfprop_fast_accum = 1", "fprop_fast_accum is 1; allowed are true and false"),
        ("base = 'mxfp8'\ndgrad_fast_accum = 'no'", "dgrad_fast_accum is 'no'; allowed are true and false"),
        ("recipe = 'bf16'\nwgrad_fast_accum = 0.0", "wgrad_fast_accum is 0.0; allowed are true and false"),
        ("recipe = 'fp8-block'\nwgrad_input_128x128 = 128", "wgrad_input_128x128 is 128; allowed are true and false"),
        ("recipe = 'fp8-rowwise'\nwgrad_input_128x128 = true", "recipe fp8-rowwise has no key 'wgrad_input_128x128'"),
        (
            "recipe = 'mxfp8'\nmin_weight_elements = -1",
            "min_weight_elements is -1; give a number of elements from 0 on (0 is off)",
        ),
        ("recipe = 'mxfp8'\nmin_weight_elements = true", "min_weight_elements is True; give a number"),
        ("recipe = 'mxfp8'\nmin_weight_elements = 1e6", "min_weight_elements is 1000000.0; give a number"),
        ("base = 'mxfp8'\nmin_weight_elements = 'auto'", "min_weight_elements is 'auto'; give a number"),
        ("strict = 'yes'\n[[rules]]\nformat = 'mxfp4'", "strict is 'yes'; allowed are true and false"),
        ("recipe = 'nvfp4'\ndisable_rht = 'no'", "disable_rht is 'no'; allowed are true and false"),
        ("name = 3\n[[rules]]\nformat = 'mxfp4'", "name is 3; it must be a string"),
        ("name = ", "is not valid TOML"),
        ("[[rules]]\nlayer = 'first'\nformat = 'mxfp4'", "rule 1: layer is 'first'; give an index or a range"),
        ("[[rules]]\nmodule_regex = '('\nformat = 'mxfp4'", "rule 1: module_regex '(' is no regular expression"),
        ("base = 'MXFP8'", "recipe 'MXFP8' is unknown; did you mean mxfp8?"),
        ("base = 'mxfp9'", "recipe 'mxfp9' is unknown; did you mean mxfp8? allowed are bf16"),
        ("base = 3", "base is 3; give the name of a recipe, a file, or a table of one"),
        ("base = 'absent.toml'", "absent.toml cannot be read"),
        ("base = 'mxfp8-then-bf16-fprop'", "mxfp8-then-bf16-fprop is a schedule, not a recipe"),
        ("recipe = 'mxfp8'\nevaluation = 'bf61'", "recipe 'bf61' is unknown; did you mean bf16?"),
        ("recipe = 'mxfp8'\nevaluation = {recipe = 'nvfp5'}", "evaluation: recipe 'nvfp5' is unknown"),
        ("recipe = 'fp8-delayed'\nbackward_override = 'dequantized'", "delayed scaling allows None only"),
        ("recipe = ['mxfp8']", "recipe ['mxfp8'] is unknown"),
        ("recipe = 'custom'", "make the CustomRecipe in Python, or write rules"),
        ("base = 'mxfp8'\n[delayed]\nlength = 3", "[delayed] has no key 'length'; allowed are margin"),
        ("base = 'mxfp8'\n[delayed]\namax_history_len = 0", "[delayed]: amax_history_len is 0; it must be"),
        ("base = 'mxfp8'\n[delayed]\nreduce_amax = 0", "reduce_amax is 0; allowed are true and false"),
        ("base = 'mxfp8'\ndelayed = 3", "delayed is 3; give a table with margin"),
        ("[[phases]]\nfrom = 0\nrecipe = 'mxfp8'", "is a schedule, not a recipe: use duotone.recipes.load_schedule"),
    ],
)
def test_wrong_files_are_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(RecipeError) as raised:
        recipes.load(str(path))
    assert message in str(raised.value) and "wrong.toml" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_unknown_names_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="recipe 'mxpf8' is unknown; did you mean mxfp8"):
        recipes.load("mxpf8")
    with pytest.raises(RecipeError, match="cannot be read: No such file"):
        recipes.load(str(tmp_path / "absent.toml"))
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="not UTF-8"):
        recipes.load(str(binary))
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(RecipeError, match="a recipe is a table of keys; got list"):
        recipes.load(str(tmp_path / "list.json"))


def test_fields_outside_their_range_are_refused_at_construction() -> None:
    for make in (
        lambda: recipes.MXFP8BlockScaling(backward_override="half"),
        lambda: recipes.MXFP8BlockScaling(fp8_format="E3M4"),
        lambda: recipes.Float8CurrentScaling(fp8_format="hybrid"),
        lambda: recipes.CustomRecipe(qfactory="mxfp8"),
    ):
        with pytest.raises(RecipeError):
            make()


EVERYTHING = """
name = "all keys"
strict = true
backward_override = "dequantized"
emulate_mixed = true
fprop_fast_accum = false
dgrad_fast_accum = true
wgrad_fast_accum = true
min_weight_elements = "measured"
evaluation = "bf16"
base = {recipe = "nvfp4", disable_rht = true}

[delayed]
margin = 1
amax_history_len = 16
amax_compute_algo = "most_recent"
reduce_amax = false

[[rules]]
module = "*.up"
module_regex = '.*\\.(up|"q")'
module_type = "*linear"
tensor_type = "weight"
layer = -1
in_features = ">=64"
out_features = "%32"
rowwise = "fp8_e4m3_delayed"
columnwise = "identity"
columnwise_source = "rowwise_dequantized"

[[rules]]
layer = "0:2"
fprop = "identity"
dgrad = "mxfp8_e4m3"
wgrad = "mxfp8_e4m3"
"""


def everything(tmp_path: Path) -> recipes.Recipe:
    (tmp_path / "all.toml").write_text(EVERYTHING)
    return recipes.load(str(tmp_path / "all.toml"))


def test_a_file_may_use_every_key(tmp_path: Path) -> None:
    recipe = everything(tmp_path)
    assert recipe == recipes.RuleRecipe(
        title="all keys",
        strict=True,
        backward_override="dequantized",
        emulate_mixed=True,
        fprop_fast_accum=False,
        dgrad_fast_accum=True,
        wgrad_fast_accum=True,
        min_weight_elements="measured",
        evaluation=recipes.HighPrecision(),
        base=recipes.NVFP4BlockScaling(disable_rht=True),
        history=History(1, 16, "most_recent", reduce_amax=False),
        rules=(
            recipes.Rule(
                module="*.up",
                module_regex='.*\\.(up|"q")',
                module_type="*linear",
                tensor_type="weight",
                layer=-1,
                in_features=">=64",
                out_features="%32",
                rowwise="fp8_e4m3_delayed",
                columnwise="identity",
                columnwise_source="rowwise_dequantized",
            ),
            recipes.Rule(layer="0:2", fprop="identity", dgrad="mxfp8_e4m3", wgrad="mxfp8_e4m3"),
        ),
    )


@pytest.mark.parametrize("make", [lambda _: recipes.load("fp8-delayed"), everything, lambda _: odd_names()])
def test_a_recipe_goes_to_json_and_toml_and_comes_back_as_it_was(make, tmp_path: Path) -> None:
    recipe = make(tmp_path)
    (tmp_path / "a.json").write_text(json.dumps(recipe.to_dict()))
    (tmp_path / "a.toml").write_text(recipes.dumps(recipe))
    for path in ("a.json", "a.toml"):
        reloaded = recipes.load(str(tmp_path / path))
        assert reloaded == recipe and hash(reloaded) == hash(recipe) and reloaded.key == recipe.key
    assert pickle.loads(pickle.dumps(recipe)) == recipe


def test_the_text_of_a_recipe_may_be_asked_for_by_its_name() -> None:
    assert recipes.dumps("mxfp8") == recipes.dumps(recipes.MXFP8BlockScaling())
    with pytest.raises(RecipeError, match="dumps takes a recipe or its name; got int"):
        recipes.dumps(3)


def odd_names() -> recipes.Recipe:
    """Texts that need escapes, and a recipe inside a recipe inside a recipe."""
    rule = recipes.Rule(module='a"b\\c\n\x7f\u00e9\U0001f600', format="mxfp8_e4m3")
    inner = recipes.RuleRecipe(rules=(rule,), title="inner = [1]")
    return recipes.RuleRecipe(rules=(), title="outer", base=inner, evaluation=inner)


def test_base_and_evaluation_are_found_beside_the_file_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "a.toml").write_text('base = "parts/b.toml"\nevaluation = "nvfp4"\n[[rules]]\nlayer=0\nformat="mxfp4"')
    (tmp_path / "parts" / "b.toml").write_text('base = "c.json"\n[[rules]]\nlayer=1\nformat="mxfp6_e2m3"')
    (tmp_path / "parts" / "c.json").write_text('{"recipe": "mxfp8", "fp8_format": "HYBRID"}')
    recipe = recipes.load(str(tmp_path / "a.toml"))
    results = [recipe.quantizer(ROLES[2], Site(layer, 3)).rowwise.name for layer in range(3)]
    assert results == ["mxfp4", "mxfp6_e2m3", "mxfp8_e5m2"]
    assert recipe.evaluation == recipes.load("nvfp4") and recipe.base.name == "b"


@pytest.mark.parametrize("key", ["base", "evaluation"])
def test_files_that_refer_to_each_other_in_a_cycle_are_named_in_one_line(tmp_path: Path, key: str) -> None:
    rule = '\n[[rules]]\nformat = "mxfp4"'
    (tmp_path / "start.toml").write_text(f'{key} = "a.toml"' + rule)
    (tmp_path / "a.toml").write_text(f'{key} = "b.toml"' + rule)
    (tmp_path / "b.toml").write_text('base = "./a.toml"' + rule)
    with pytest.raises(RecipeError) as raised:
        recipes.load(str(tmp_path / "start.toml"))
    message = "recipe files refer to each other in a cycle: a.toml -> b.toml -> a.toml; let one of them name no other"
    assert str(raised.value) == message
    (tmp_path / "self.toml").write_text('base = "self.toml"')
    with pytest.raises(RecipeError, match=r"cycle: self.toml -> self.toml"):
        recipes.load(str(tmp_path / "self.toml"))


def test_a_file_that_two_others_name_is_no_cycle(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[[rules]]\nformat = 'mxfp4'")
    (tmp_path / "a.toml").write_text("base = 'c.toml'\nevaluation = 'c.toml'")
    recipe = recipes.load(str(tmp_path / "a.toml"))
    assert recipe.base == recipe.evaluation == recipes.load(str(tmp_path / "c.toml"))


def test_an_error_in_a_file_that_another_names_says_both(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("base = 'b.toml'")
    (tmp_path / "b.toml").write_text("[[rules]]\nformat = 'mxfp9'")
    with pytest.raises(RecipeError, match=r"a\.toml: .*b\.toml: rule 1: format 'mxfp9' is unknown") as raised:
        recipes.load(str(tmp_path / "a.toml"))
    assert "\n" not in str(raised.value)


def test_a_recipe_whose_fields_changed_has_another_name_than_the_built_in() -> None:
    """Tables and records of both stand side by side. `strict` changes no result, and no name."""
    plain = recipes.load("fp8-current")
    assert plain.name == replace(plain, strict=True).name == "fp8-current"
    assert replace(plain, backward_override="high_precision").name == "fp8-current (backward_override = high_precision)"
    both = recipes.DelayedScaling(amax_history_len=4, evaluation=recipes.load("bf16"))
    assert both.name == "fp8-delayed (evaluation = bf16, amax_history_len = 4)"
    built_in_names = {recipes.load(name).name for name in recipes.names()}
    assert built_in_names == set(recipes.names())


@pytest.mark.parametrize("argument", [None, 3, ["mxfp8"]])
def test_what_is_neither_a_name_nor_a_path_is_not_loaded(argument) -> None:
    with pytest.raises(RecipeError, match=r"loaded by its name or the path of its file; got"):
        recipes.load(argument)


def test_a_path_is_as_good_as_its_name(tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('recipe = "mxfp8"\n')
    assert recipes.load(path) == recipes.load(str(path)) == recipes.load("mxfp8")


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_that_ships_answers_every_tensor_of_the_modules_that_there_are(name):
    """Also for attention and boundaries, which a rule without a tensor type decides too."""
    recipe = recipes.load(name)
    for module_type, tensor_types in TENSORS_OF_MODULES.items():
        for tensor_type in tensor_types:
            assert recipe(QuantizerRole(module_type, tensor_type, "a")) is not None
