"""Patterns on names: what `re` matches, whatever the pattern, in bounded time."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duotone.errors import RecipeError
from duotone.recipes.conditions import LARGEST, Expression, glob

ATOMS = st.sampled_from(["a", "b", r"\.", ".", "[ab]", "[^a]", r"\w", r"\d", "^", "$", r"\b", r"\Z", "(?:)"])


def larger(inner):
    repeated = st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "{2}", "{0,2}", "{1,}?"]))
    return st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        repeated.map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    )


PATTERNS = st.tuples(
    st.sampled_from(["", "(?i)", "(?!.*b)", "(?=.*a)(?!b)"]), st.recursive(ATOMS, larger, max_leaves=6)
).map("".join)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(PATTERNS, st.text("abA.1\n", max_size=6))
def test_it_matches_what_re_matches(pattern, text):
    if pattern.startswith("(?=") or pattern.startswith("(?!"):
        head, rest = re.fullmatch(r"((?:\(\?[=!][^)]*\))+)(.*)", pattern, re.DOTALL).groups()
        pattern = f"{head}(?:{rest})"  # a branch would take the lookahead with it
    assert Expression(pattern).matches(text) == (re.fullmatch(pattern, text) is not None)


@pytest.mark.parametrize(
    "pattern", [r"(a|a)*b", r"(a*)*b", r"(a+)+b", r"(.*)*b", "a?" * 40 + "a" * 40, "(a|a)" * 40 + "b"]
)
def test_patterns_that_take_re_for_ever_are_matched(pattern):
    """2^40 ways lead through the name; the answer comes from at most 2,000 states for each of its characters."""
    assert not Expression(pattern).matches("a" * 39 + "c")
    if "b" in pattern:
        assert Expression(pattern).matches("a" * 40 + "b")
    else:
        assert Expression(pattern).matches("a" * 60)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (r"(a)\1", "has groupref, which Duotone does not match: leave that out, or write several rules"),
        ("(?<=a)b", "has a lookaround that is no lookahead at the start"),
        ("a(?=b)b", "has a lookaround that is no lookahead at the start"),
        ("(?i:a)", "has flags of a group"),
        ("a++", "has possessive repeat"),
        ("(?>a)", "has atomic group"),
        ("(?:a{99}){99}", f"has more than {LARGEST} states with its repeats written out"),
        ("a{4294967294}", f"has more than {LARGEST} states"),
        ("(", "is no regular expression: missing )"),
        ("(" * 1000, "is nested too deep: simplify it"),
        ("a{99999999999999999999}", "is no regular expression: the repetition number is too large"),
    ],
)
def test_what_has_no_bound_is_refused_in_one_line(pattern, words):
    with pytest.raises(RecipeError, match=re.escape(words)) as raised:
        Expression(pattern)
    assert "\n" not in str(raised.value)


def test_an_empty_body_is_repeated_at_no_cost():
    assert Expression("(?:(?:){99999}){99999}a").matches("a")


def test_many_globs_are_translated_once():
    before = glob.cache_info().misses
    for _ in range(2):
        assert all(glob(f"layers.{i}.*").match(f"layers.{i}.up") for i in range(2000))
    assert glob.cache_info().misses <= before + 2000
