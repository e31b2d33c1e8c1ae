"""Intervals and ranks, compared with scipy's Student's t and its paired test."""

import random
import statistics

import pytest

from duotone import recipes
from duotone_lab.training.loop import Run
from duotone_lab.training.ranking import Judgement, is_better, judged_step, margin, ranks, t_quantile
from later import Later

stats = Later("scipy.stats")


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 30, 1000])
def test_the_quantile_is_that_of_students_t(freedom: int) -> None:
    assert t_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)


def test_the_margin_is_half_of_the_interval_of_the_mean() -> None:
    values = [0.41, 0.22, 0.57, 0.31]
    low, high = stats.t.interval(0.95, 3, loc=statistics.fmean(values), scale=stats.sem(values))
    assert margin(values) == pytest.approx((high - low) / 2)
    assert margin([0.4]) is None


def test_better_is_what_the_paired_t_test_calls_so() -> None:
    draw = random.Random(0)
    answers = set()
    for shift in (0.0, 0.05, 0.1, 0.3):
        for _ in range(20):
            common = [draw.gauss(0, 5) for _ in range(4)]
            left = {seed: value + draw.gauss(0, 0.1) for seed, value in enumerate(common)}
            right = {seed: value + shift + draw.gauss(0, 0.1) for seed, value in enumerate(common)}
            test = stats.ttest_rel(list(left.values()), list(right.values()))
            expected = bool(test.pvalue < 0.05 and test.statistic < 0)
            assert is_better(left, right) is expected
            answers.add(expected)
    assert answers == {True, False}


def test_recipes_that_cannot_be_told_apart_share_a_rank() -> None:
    gaps = {
        "best": {0: 0.00, 1: 0.01, 2: 0.02},
        "same": {0: 0.02, 1: 0.00, 2: 0.01},
        "worse": {0: 1.00, 1: 1.01, 2: 1.02},
        "worst": {0: 2.00, 1: 2.02, 2: 2.01},
    }
    assert ranks(gaps) == {"best": 1, "same": 1, "worse": 3, "worst": 4}


def test_one_seed_gives_no_ranks() -> None:
    assert ranks({"a": {0: 0.0}, "b": {0: 9.0}}) == {"a": None, "b": None}
    assert ranks({"a": {0: 0.0, 1: 0.1}, "b": {0: 9.0}}) == {"a": None, "b": None}


def test_the_judged_step_is_the_last_that_all_share_with_the_reference() -> None:
    reference = [(25, 3.0), (50, 2.0), (75, 1.5)]
    assert judged_step([reference, [(25, 3.0), (50, 2.1), (60, 1.9)], reference]) == 50
    assert judged_step([reference, [(7, 3.0)]]) == 75  # stopped before the first of the reference
    assert judged_step([reference, [(25, 3.0), (50, None)]]) == 25
    assert judged_step([[]]) is None


def run(name: str, seed: int, loss: float, **options: object) -> Run:
    return Run(name, recipes.load("bf16"), seed, heldout_loss=[(10, loss)], **options)


def test_a_recipe_that_failed_under_one_seed_has_no_gap_and_no_rank() -> None:
    runs = [run("bf16", seed, 2.0 + seed, is_reference=True) for seed in (0, 1)]
    runs += [run("good", 0, 2.1), run("good", 1, 3.0), run("bad", 0, 2.2), run("bad", 1, 3.3, error="the loss is nan")]
    judgement = Judgement(runs)
    assert judgement.step == 10 and judgement.gaps["good"] == pytest.approx({0: 5.0, 1: 0.0})
    assert judgement.gaps["bad"] == {} and "bad" not in judgement.ranks
    assert judgement.verdict("good")["judged_loss"] == pytest.approx(2.55)
    assert judgement.verdict("bad")["judged_loss"] is None
