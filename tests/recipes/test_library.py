"""Recipes by name and from files: round trips, and one-line refusals."""

import json
import pickle
from pathlib import Path

import pytest

from duotone import recipes
from duotone.errors import RecipeError
from duotone.recipes.roles import QuantizerRole

ROLES = [QuantizerRole("linear", kind, "a.b") for kind in ("input", "weight", "grad_output")]


@pytest.mark.parametrize("name", recipes.names())
def test_recipes_are_values_and_survive_json_and_pickle(name: str) -> None:
    recipe = recipes.load(name)
    assert recipe.name == name
    assert recipe == recipes.load(name) and hash(recipe) == hash(recipes.load(name))
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    again = recipes.from_dict(json.loads(json.dumps(recipe.to_dict())))
    assert again == recipe and [again(role) for role in ROLES] == [recipe(role) for role in ROLES]


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
    got = ["/".join(dict.fromkeys((q.rowwise.name, q.columnwise.name))) for q in quantizers]
    assert got == expected


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


def test_a_role_that_no_rule_matches_stays_in_high_precision(tmp_path: Path) -> None:
    recipe = recipes.RuleRecipe(rules=(recipes.Rule(tensor_type="input", format="mxfp8_e4m3"),))
    assert recipe(ROLES[1]).rowwise.name == "identity"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs [[rules]]"),
        ("rules = []", "at least one rule"),
        ("rule = 3", "no key 'rule'; allowed are name, strict, backward_override, rules"),
        ("[[rules]]\nformt = 'mxfp8_e4m3'", "rule 1 has no key 'formt'; allowed are module"),
        ("[[rules]]\nformat = 'mxfp9'", "format 'mxfp9' is unknown; did you mean"),
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
        ("strict = 'yes'\n[[rules]]\nformat = 'mxfp4'", "strict is 'yes'; allowed are true and false"),
        ("recipe = 'nvfp4'\ndisable_rht = 'no'", "disable_rht is 'no'; allowed are true and false"),
        ("name = 3\n[[rules]]\nformat = 'mxfp4'", "name is 3; it must be a string"),
        ("name = ", "is not valid TOML"),
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
