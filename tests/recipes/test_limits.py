"""Files that are too large, too deep, out of range or no files: one line."""

import json
import os
import sys
import warnings
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duotone import formats, recipes
from duotone.errors import RecipeError, UserError
from duotone.recipes import QuantizerRole, RuleRecipe, Schedule
from duotone.tensor import History

RULE = '\n[[rules]]\nformat = "mxfp4"\n'


def refused(path):
    with pytest.raises(RecipeError) as raised:
        recipes.load_any(str(path))
    text = str(raised.value)
    assert text.isprintable() and len(text) < 1500
    return text


def table(**values):
    return {**values, "rules": [{"format": "mxfp4"}]}


@pytest.fixture(autouse=True)
def recursion() -> Iterator[None]:
    """Python's own limit, which other packages raise when they are imported."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


def nested(depth):
    result = table()
    for _ in range(depth):
        result = table(base=result)
    return json.dumps(result)


WRONG = {
    "deep.json": (nested(500), "recipes are nested too deep, in tables or over files; merge some of them"),
    "brackets.json": ("[" * 100_000, "is not valid JSON: it is nested too deep"),
    "brackets.toml": ("a=" + "[" * 100_000, "is not valid TOML: it is nested too deep"),
    "nul.json": ('{"base": "a\\u0000b.toml"}', "a\\x00b.toml cannot be read: embedded null byte"),
    "nul-name.json": (json.dumps(table(name="a\0b")), "it must be one line of printable text"),
    "surrogate.json": ('{"name": "\\ud800", "rules": [{"format": "mxfp4"}]}', "it must be one line of printable text"),
    "key.json": ('{"\\ud800": 1}', "has no key '\\ud800'"),
    "digits-5000.toml": (
        "recipe = 'mxfp8'\nmin_weight_elements = " + "1" * 5000,
        "is not valid TOML: Exceeds the limit (4300 digits)",
    ),
    "digits-5000.json": (
        '{"recipe": "mxfp8", "min_weight_elements": ' + "1" * 5000 + "}",
        "is not valid JSON: Exceeds the limit (4300 digits)",
    ),
    "digits-hex.toml": ("recipe = 'fp8-delayed'\nmargin = 0x" + "f" * 5000, "Exceeds the limit (4300 digits)"),
    "epsilon.toml": ("recipe = 'fp8-current'\namax_epsilon = 1e300", "amax_epsilon is 1e+300; it must be a number"),
    "epsilon-inf.toml": ("recipe = 'fp8-block'\namax_epsilon = inf", "amax_epsilon is inf; it must be a number"),
    "epsilon-nan.json": ('{"recipe": "fp8-rowwise", "amax_epsilon": NaN}', "amax_epsilon is nan; it must be a number"),
    "floor.toml": (
        "[[rules]]\nformat = 'fp8_e4m3_tensor_eps1e300'",
        "the amax floor '1e300' is no positive number of fp32",
    ),
    "margin.toml": ("recipe = 'fp8-delayed'\nmargin = -100000", "margin is -100000"),
    "margin-150.toml": ("base = 'mxfp8'\n[delayed]\nmargin = 150", "margin is 150"),
    "length.toml": ("recipe = 'fp8-delayed'\namax_history_len = 1000000000000", "at least 1 and at most 1048576"),
    "length-rules.toml": ("base = 'mxfp8'\ndelayed = {amax_history_len = 1000000000000}", "at most 1048576"),
    "keys.toml": ("".join(f"a.b.c{i} = 1\n" for i in range(50_000)), "a recipe file has no key 'a'"),
    "keys-200000.toml": ("".join(f"a.b.c{i} = 1\n" for i in range(200_000)), "it has more than 1048576 bytes"),
    "layer.toml": ("[[rules]]\nformat = 'mxfp4'\nlayer = '0:" + "9" * 500 + "'", "give an index or a range"),
    "layer-number.toml": ("[[rules]]\nformat = 'mxfp4'\nlayer = 1000000000", "layer is 1000000000; give an index"),
    "size.toml": ("[[rules]]\nformat = 'mxfp4'\nin_features = '>" + "9" * 500 + "'", "give a comparison such as"),
    "regex.toml": (
        "[[rules]]\nformat = 'mxfp4'\nmodule_regex = '(a{99}){99}'",
        "rule 1: module_regex '(a{99}){99}' has a repeat inside of a repeat",
    ),
    "regex-long.toml": (
        f"[[rules]]\nformat = 'mxfp4'\nmodule_regex = '{'a' * 201}'",
        "has 201 characters; give at most 200",
    ),
    "twice.json": ('{"recipe": "mxfp8", "recipe": "nvfp4"}', "is not valid JSON: the key 'recipe' comes twice"),
    "beside.toml": (
        "recipe = 'mxfp8'" + RULE,
        "recipe and rules stand side by side; beside rules write base = 'mxfp8'",
    ),
    "beside.json": ('{"recipe": "mxfp8", "delayed": {}}', "recipe and delayed stand side by side"),
    "mine.yaml": ("recipe: mxfp8", "mine.yaml is neither .toml nor .json: write it as one of these"),
    "recipe": ("recipe = 'mxfp8'", "recipe is neither .toml nor .json: write it as one of these"),
    "empty.toml": ("", "needs [[rules]]"),
    "empty.json": ("", "is not valid JSON: Expecting value"),
    "line.toml": ('base = "a\\nb.toml"', "a\\nb.toml cannot be read: No such file"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_is_no_recipe_is_refused_in_one_line(tmp_path, name):
    text, words = WRONG[name]
    (tmp_path / name).write_text(text)
    assert words in refused(tmp_path / name)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.mkdir(), "cannot be read: it is a directory"),
        (lambda path: os.mkfifo(path), "cannot be read: it is no regular file"),
        (lambda path: path.symlink_to(path), "cannot be read: Too many levels of symbolic links"),
        (lambda path: path.symlink_to("/dev/zero"), "cannot be read: it is no regular file"),
        (
            lambda path: path.write_bytes(b"\x7fELF\x00\x01\xff"),
            "cannot be read: it is not UTF-8 text; save it as UTF-8",
        ),
        (lambda path: path.write_bytes("name = 'a'".encode("utf-16")), "it is not UTF-8 text; save it as UTF-8"),
        (lambda path: path.write_bytes(b"\0" * 100), "is not valid TOML"),
        (lambda path: path.write_bytes(b"#" * (2**20 + 1)), "it has more than 1048576 bytes"),
    ],
)
def test_what_is_no_text_file_is_refused_in_one_line(tmp_path, make, words):
    make(tmp_path / "wrong.toml")
    assert words in refused(tmp_path / "wrong.toml")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything: run the tests as another user")
def test_a_file_that_may_not_be_read_is_refused(tmp_path):
    (tmp_path / "secret.toml").write_text("recipe = 'mxfp8'")
    (tmp_path / "secret.toml").chmod(0)
    assert "cannot be read: Permission denied" in refused(tmp_path / "secret.toml")


@pytest.mark.parametrize(
    "name", ["a\0b", "a\0b.toml", "\ud800", "\ud800.toml", "x" * 100_000, "x" * 300 + ".toml", "", "."]
)
def test_a_name_that_no_file_has_is_refused_in_one_line(name):
    refused(name)


def test_a_file_of_any_name_is_read(tmp_path):
    for name in (b"\xff.toml", b"a\nb.toml"):
        path = os.path.join(os.fsencode(tmp_path), name)
        with open(path, "w") as file:
            file.write(RULE)
        assert recipes.load(os.fsdecode(path)).name == {b"\xff.toml": "\ufffd", b"a\nb.toml": "a\\nb"}[name]


def test_files_that_name_each_other_500_deep_are_refused(tmp_path):
    for i in range(500):
        (tmp_path / f"{i}.toml").write_text(f'base = "{i + 1}.toml"' + RULE)
    (tmp_path / "500.toml").write_text('recipe = "mxfp8"')
    assert refused(tmp_path / "0.toml") == "recipes are nested too deep, in tables or over files; merge some of them"
    assert recipes.load(str(tmp_path / "485.toml")).name == "485"


def test_a_file_is_read_once_however_many_ways_lead_to_it(tmp_path):
    """2^15 of them here, which would be hours."""
    for i in range(15):
        (tmp_path / f"{i}.toml").write_text(f'base = "{i + 1}.toml"\nevaluation = {{base = "{i + 1}.toml"}}')
    (tmp_path / "15.toml").write_text('recipe = "mxfp8"')
    assert "has evaluation, and a base gives quantizers alone" in refused(tmp_path / "0.toml")


@pytest.mark.parametrize("name", ["bom.toml", "bom.json"])
def test_a_byte_order_mark_is_no_part_of_a_recipe(tmp_path, name):
    text = 'recipe = "mxfp8"' if name.endswith("toml") else '{"recipe": "mxfp8"}'
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert recipes.load(str(tmp_path / name)) == recipes.load("mxfp8")


def test_thousands_of_rules_are_read_and_asked(tmp_path):
    rules = "".join(f"[[rules]]\nformat = 'mxfp4'\nmodule = 'layers.{i}.*'\n" for i in range(10_000))
    (tmp_path / "many.toml").write_text(rules)
    recipe = recipes.load(str(tmp_path / "many.toml"))
    role = QuantizerRole("linear", "weight", "layers.9999.up")
    assert (
        recipe(role).rowwise.name == "mxfp4"
        and recipe(QuantizerRole("linear", "weight", "up")).rowwise.name == "identity"
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: recipes.DelayedScaling(amax_history_len=10**12), "at least 1 and at most 1048576"),
        (lambda: recipes.DelayedScaling(amax_history_len=True), "amax_history_len is True; it must be an integer"),
        (lambda: recipes.DelayedScaling(margin=-100_000), "margin is -100000"),
        (lambda: recipes.DelayedScaling(margin=150), "margin is 150"),
        (lambda: recipes.DelayedScalingRequest(amax_history_len=10**12), "at most 1048576"),
        (lambda: History(amax_history_len=10**12), "at most 1048576"),
        (lambda: recipes.Float8CurrentScaling(amax_epsilon=1e300), "amax_epsilon is 1e+300"),
        (lambda: recipes.Float8BlockScaling(amax_epsilon=10**400), "that fp32 has"),
        (lambda: formats.get("fp8_e4m3_row_eps1e39"), "is no positive number of fp32"),
        (lambda: RuleRecipe(rules=(), title="a\0"), "title is 'a\\x00'; it must be one line"),
        (lambda: RuleRecipe(rules=(), title="a\nb"), "title is 'a\\nb'; it must be one line of printable text"),
        (lambda: Schedule((recipes.Phase(recipes.load("mxfp8"), 0),), title="\ud800"), "title is '\\ud800'; it must"),
        (lambda: recipes.from_dict(json.loads(nested(500))), "recipes are nested too deep"),
    ],
)
def test_values_made_in_python_have_the_same_limits(make, words):
    with pytest.raises(UserError) as raised:
        make()
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_the_largest_floor_and_history_work():
    largest = 3.4028234663852886e38
    assert recipes.Float8CurrentScaling(amax_epsilon=largest)(QuantizerRole("linear", "input")).rowwise.name.endswith(
        "e+38"
    )
    assert recipes.DelayedScaling(amax_history_len=2**20).amax_history_len == 2**20


KEYS = [
    *("name", "recipe", "base", "evaluation", "rules", "phases", "delayed", "steps", "from", "strict", "margin"),
    *("amax_history_len", "amax_epsilon", "fp8_format", "min_weight_elements", "backward_override", "disable_rht"),
    *("module", "module_regex", "module_type", "tensor_type", "layer", "in_features", "format", "rowwise", "fprop"),
    *("columnwise_source", "amax_compute_algo", "convert_parameters", "reduce_amax"),
]
WORDS = st.sampled_from(
    [
        *("mxfp8", "nvfp4", "bf16", "fp8-delayed", "fp8-block", "mxfp8_e4m3", "identity", "fp8_e4m3_delayed", "input"),
        *("weight", "linear", "-2:", "0", ">=64", "%0", "max", "HYBRID", "rowwise_dequantized", "a.toml", "../..", "/"),
        *(
            "mxfp8-then-bf16-fprop",
            "(a|b)*",
            "(",
            "[",
            "a{99}",
            "fp8_e4m3_tensor_eps1",
            "measured",
            "custom",
            "dequantized",
        ),
    ]
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)),
    max_leaves=12,
)
ROWS = st.lists(st.dictionaries(st.sampled_from(KEYS), st.one_of(WORDS, VALUES), max_size=4), min_size=1, max_size=3)
TABLES = st.one_of(
    VALUES,
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6),
    st.builds(
        lambda rules, more: {**more, "rules": rules}, ROWS, st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=2)
    ),
    st.builds(lambda phases: {"phases": phases}, ROWS),
    st.builds(
        lambda kind, more: {**more, "recipe": kind}, WORDS, st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3)
    ),
)


def check_any(load):
    """Either a recipe that goes to text and back, or one line."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = load()
        except RecipeError as error:
            assert str(error).isprintable()
            return
    assert recipes.any_from_dict(json.loads(json.dumps(result.to_dict()))) == result


@settings(max_examples=300, deadline=None, derandomize=True)
@given(TABLES)
def test_no_table_ends_in_a_traceback(table):
    check_any(lambda: recipes.any_from_dict(table))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    content=st.one_of(st.binary(max_size=40), TABLES.map(lambda table: json.dumps(table).encode())),
    kind=st.sampled_from(["toml", "json"]),
)
def test_no_file_ends_in_a_traceback(tmp_path_factory, content, kind):
    path = tmp_path_factory.getbasetemp() / f"fuzz.{kind}"
    path.write_bytes(content)
    check_any(lambda: recipes.load_any(path))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(
        st.sampled_from([*KEYS, *"=[]{}.'\"\n,", "[[rules]]\n", "1", "'mxfp8'", "\\", "\0", "é"]), max_size=25
    ).map(" ".join)
)
def test_no_text_ends_in_a_traceback(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "text.toml"
    path.write_text(text)
    check_any(lambda: recipes.load_any(path))
