"""Which recipe is better: gaps paired by seed, their intervals, and ranks that equal recipes share."""

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import cache

from duotone_lab.training.loop import Run
from duotone_lab.training.schema import Losses, Verdict

CONFIDENCE = 0.95

Gaps = Mapping[int, float]
"""The gap of one recipe by seed, in percent."""


@cache
def t_quantile(freedom: int) -> float:
    """Standard errors that the mean of `freedom` + 1 normal values stays within in 95 of 100 cases.

    Two sides of Student's t distribution, whose tails are the incomplete beta function I(v / (v + t^2); v / 2, 1 / 2).
    """
    import mpmath

    def excess(t: float) -> float:
        tails = mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True)
        return tails - (1 - CONFIDENCE)

    return float(mpmath.findroot(excess, (1.0, 20.0), solver="anderson"))


def margin(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of the mean of `values`; None for fewer than two."""
    if len(values) < 2:
        return None
    return t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def is_better(gaps: Gaps, other: Gaps) -> bool | None:
    """Whether the 95 % interval of the paired differences lies below zero; None if two seeds in common lack."""
    differences = [gaps[seed] - other[seed] for seed in gaps.keys() & other.keys()]
    width = margin(differences)
    return None if width is None else statistics.fmean(differences) + width < 0


def ranks(recipes: Mapping[str, Gaps]) -> dict[str, int | None]:
    """One more than the number of recipes that are better, so those that cannot be told apart share a rank.

    None for all of them where a pair has fewer than two seeds in common.
    """
    better = {name: [is_better(other, gaps) for other in recipes.values()] for name, gaps in recipes.items()}
    if any(answer is None for answers in better.values() for answer in answers):
        return dict.fromkeys(recipes)
    return {name: 1 + sum(map(bool, answers)) for name, answers in better.items()}


class Judgement:
    """The gaps of all recipes at the last held-out step that each of them reached under the first seed.

    A recipe that failed under any seed, or shares no such step with the reference, has no gap and no rank.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.recipes: dict[str, list[Run]] = {}
        for run in runs:
            self.recipes.setdefault(run.name, []).append(run)
        sound = {name: runs for name, runs in self.recipes.items() if not any(run.error for run in runs)}
        reference = next((runs for runs in sound.values() if runs[0].is_reference), ())
        self.step = judged_step([runs[0].heldout_loss for runs in sound.values()]) if reference else None
        self._losses = {name: _losses_at(self.step, sound.get(name, ())) for name in self.recipes}
        base = _losses_at(self.step, reference)
        self.gaps = {
            name: {seed: 100.0 * (losses[seed] - base[seed]) / base[seed] for seed in losses if base.get(seed)}
            for name, losses in self._losses.items()
        }
        noise = {run.name for run in runs if run.is_noise}
        self.ranks = ranks({name: gaps for name, gaps in self.gaps.items() if gaps and name not in noise})

    def verdict(self, name: str) -> Verdict:
        """The result of a recipe: means over the seeds that count."""
        gaps, losses = self.gaps[name], self._losses[name].values()
        last = self.recipes[name][0].final_heldout_loss if self.step is None else None
        return {
            "judged_loss": statistics.fmean(losses) if losses else last,
            "gap_percent": statistics.fmean(gaps.values()) if gaps else None,
            "gap_margin": margin(list(gaps.values())),
            "gaps": [[seed, gap] for seed, gap in gaps.items()],
            "rank": self.ranks.get(name),
        }


def judged_step(curves: Sequence[Losses]) -> int | None:
    """The last step that all curves have; those that share none with the first one are left out."""
    steps = [{step for step, loss in curve if loss is not None} for curve in curves]
    shared = [steps[0] & other for other in steps]
    return max(steps[0].intersection(*filter(None, shared)), default=None)


def _losses_at(step: int | None, runs: Sequence[Run]) -> dict[int, float]:
    """The held-out loss at `step` by seed."""
    losses = ((run.seed, dict(run.heldout_loss).get(step)) for run in runs if step is not None)
    return {seed: loss for seed, loss in losses if loss is not None}
