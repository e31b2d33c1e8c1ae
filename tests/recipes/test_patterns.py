"""Patterns on names: what `re` matches, unless it repeats a part that repeats, or is long."""

import re

import pytest

from duotone.errors import RecipeError
from duotone.recipes import QuantizerRole, Rule
from duotone.recipes.conditions import LONGEST, expression, glob
from duotone.recipes.roles import Site


def matches(pattern: str, name: str) -> bool:
    return Rule(module_regex=pattern, format="mxfp8_e4m3").matches(QuantizerRole("linear", "input", name), Site())


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        (r"model\.layers\.[0-3]\..*", "model.layers.2.up", True),
        (r"model\.layers\.[0-3]\..*", "model.layers.4.up", False),
        ("up", "up.more", False),
        ("(?!.*lm_head).*", "model.up", True),
        ("(?!.*lm_head).*", "model.lm_head", False),
        (r"(a|b)\.\1", "b.b", True),
        ("(?i:UP).*(?<=x)", "up.x", True),
        (r"layers\.\d+(\.attn\..*)?", "layers.10.attn.q", True),
        (r"layers\.\d+(\.attn\..*)?", "layers.10", True),
        (r"(layers\.\d+|embedding|head){1}", "layers.10", True),
        ("a++b*?", "aab", True),
        ("a" * LONGEST, "a" * LONGEST, True),
    ],
)
def test_a_rule_matches_the_names_that_its_expression_matches_as_a_whole(pattern, name, expected) -> None:
    assert matches(pattern, name) is expected


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a*)*b",
        r"(a+)+b",
        r"(?:a?b?)*",
        r"(\w+\.)*up",
        r"(?:x(?:y|z(?:a{2,}))){3}",
        r"((?=a*)a)+",
        r"(a)(?:(?(1)b+|c)d)*",
        r"(?>a*)*",
        r"(a*+)+",
        r"(.*?)*?",
        r"((a{9})?){9}",
        "(?:(?:){99999}){99999}a",
    ],
)
def test_a_repeat_inside_of_a_repeat_is_refused(pattern) -> None:
    with pytest.raises(RecipeError, match=r"^module_regex [^\n]* has a repeat inside of a repeat[^\n]*$"):
        Rule(module_regex=pattern, format="mxfp4")


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(", "is no regular expression: missing )"),
        ("a{99999999999999999999}", "is no regular expression: the repetition number is too large"),
        ("a" * (LONGEST + 1), "has 201 characters; give at most 200, or several rules"),
        ("(" * 1000, "has 1000 characters"),
        ("(" * 199, "is no regular expression: missing )"),
    ],
)
def test_what_is_no_expression_is_one_line(pattern, words) -> None:
    with pytest.raises(RecipeError, match=re.escape(words)) as raised:
        expression(pattern)
    assert "\n" not in str(raised.value)


def test_a_deep_expression_is_read() -> None:
    assert expression("(" * 99 + ")" * 99).fullmatch("")


def test_many_globs_are_translated_once():
    before = glob.cache_info().misses
    for _ in range(2):
        assert all(glob(f"layers.{i}.*").match(f"layers.{i}.up") for i in range(2000))
    assert glob.cache_info().misses <= before + 2000
