import itertools
import random
import sys

import pytest

from duotone.errors import UserError
from duotone_lab.training import goal

pytest.importorskip("scipy", reason="pip install 'scipy>=1.11'")


@pytest.mark.parametrize("seed", range(6))
def test_it_is_the_best_of_all_choices_that_meet_the_limit(seed):
    draw = random.Random(seed)
    groups = [[(draw.random(), draw.random()) for _ in range(draw.randint(1, 4))] for _ in range(6)]
    limit = 0.9 * sum(max(used for _, used in group) for group in groups)
    choices = list(itertools.product(*(range(len(group)) for group in groups)))

    def total(places, which):
        return sum(group[place][which] for group, place in zip(groups, places, strict=True))

    best = min((total(places, 0) for places in choices if total(places, 1) <= limit), default=None)
    places = goal.choose_cheapest(groups, limit)
    assert total(places, 1) <= limit * (1 + 1e-9) and total(places, 0) == pytest.approx(best, rel=1e-4)


def test_small_numbers_are_no_zeros():
    """Costs in nats are far below the absolute tolerances of a solver."""
    assert goal.choose_cheapest([[(3e-9, 1e-9), (2e-9, 2e-9)], [(3e-9, 1e-9), (1e-9, 2e-9)]], 3e-9) == [0, 1]


def test_a_limit_of_zero_leaves_what_uses_nothing():
    assert goal.choose_cheapest([[(1.0, 0.0), (0.0, 1e-6)]], 0.0) == [0]


def test_a_limit_that_cannot_be_met_gives_none():
    assert goal.choose_cheapest([[(0.0, 1.0)], [(0.0, 1.0)]], 1.9) is None


def test_without_scipy_the_error_names_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(UserError, match=r"^duotone search needs scipy, .*: pip install 'scipy>=1.11'$"):
        goal.require_solver()
