"""The goal of a search, and predictions for its options: gap, speed and memory."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from duotone.errors import UserError
from duotone.observe.candidates import REFERENCE, Gemm
from duotone_lab.training.gemm_options import Option, Options

Costs = Mapping[tuple[str, str, str], float]
"""The predicted gap in percent that a module, GEMM and recipe add."""

Priced = tuple[float, float]
"""How much an option adds to the objective, and to the limited sum."""


@dataclass(frozen=True)
class Prediction:
    """The prediction for a choice of all GEMMs: the gap to bf16 in percent, and over bf16 the speed of the linears
    (None if unknown) and the bytes that they keep for backward."""

    gap_percent: float
    speed: float | None
    memory: float


def predict(chosen: Mapping[Gemm, Option], costs: Costs) -> Prediction:
    """The sum of the chosen options. The speed is None if that of one option is unknown."""
    times = [option.time for option in chosen.values() if option.time is not None]
    return Prediction(
        sum(costs[*gemm, option.recipe] for gemm, option in chosen.items()),
        1 / sum(times) if len(times) == len(chosen) else None,
        sum(option.memory for option in chosen.values()),
    )


@dataclass(frozen=True)
class Goal:
    """At least that `speed`, at most that `memory`, both over bf16, or at most that `gap` in percent."""

    kind: str
    value: float

    def __str__(self) -> str:
        return f"{self.kind}={self.value:g}"

    def usable(self, options: Options, where: str, measured: str = "") -> Options:
        """The options that matter for the goal. UserError, with the best possible value, if no choice meets the goal.

        `where` names the GPU and the shapes, `measured` the shapes whose speed is known.
        """
        if all(len(choices) == 1 for choices in options.values()):
            raise UserError(f"{REFERENCE} alone leaves nothing to choose: name another recipe with --recipes")
        if self.kind == "memory":
            least = sum(min(option.memory for option in choices) for choices in options.values())
            if least > self.value:
                raise UserError(
                    f"memory={self.value:g} cannot be met {where}: the least is {math.ceil(1e3 * least) / 1e3} of bf16"
                )
            return options
        timed = {gemm: [option for option in choices if option.time is not None] for gemm, choices in options.items()}
        if all(len(choices) == 1 for choices in timed.values()):
            raise UserError(f"no speed is known {where}, but for {measured}: name a size such as --as 4096x8192")
        most = 1 / sum(min(option.time or 0.0 for option in choices) for choices in timed.values())
        if self.kind == "speed" and most < self.value:
            raise UserError(
                f"speed={self.value:g} cannot be met {where}: the most is {math.floor(1e3 * most) / 1e3} times bf16"
            )
        return timed

    def choose(self, options: Options, costs: Costs) -> dict[Gemm, Option]:
        """The options with the least gap that meet the goal; for a gap, the fastest. None has an infinite cost."""
        options = {
            gemm: [option for option in choices if math.isfinite(costs[*gemm, option.recipe])]
            for gemm, choices in options.items()
        }
        priced = [
            [self._priced(option, costs[*gemm, option.recipe]) for option in choices]
            for gemm, choices in options.items()
        ]
        places = choose_cheapest(priced, 1 / self.value if self.kind == "speed" else self.value)
        if places is None:
            raise UserError(f"{self} cannot be met by formats under which the loss stays finite: ask for less")
        return {gemm: choices[place] for (gemm, choices), place in zip(options.items(), places, strict=True)}

    def _priced(self, option: Option, cost: float) -> Priced:
        time = option.time or 0.0
        return {"speed": (cost, time), "memory": (cost, option.memory), "gap": (time, cost)}[self.kind]


def require_solver() -> None:
    """UserError unless scipy is installed."""
    try:
        import scipy.optimize  # noqa: F401
    except ImportError as error:
        raise UserError("duotone search needs scipy, which is not installed: pip install 'scipy>=1.11'") from error


def choose_cheapest(groups: Sequence[Sequence[Priced]], limit: float) -> list[int] | None:
    """The place of the chosen option in each group, which has at least one; None if no choice meets the limit.

    An integer program, solved by HiGHS in scipy.
    """
    import numpy as np
    from scipy import sparse
    from scipy.optimize import LinearConstraint, milp

    objective, used = np.array([option for group in groups for option in group], dtype=float).T
    counts = [len(group) for group in groups]
    owner = np.repeat(np.arange(len(groups)), counts)
    one_each = sparse.csr_array((np.ones(len(owner)), (owner, np.arange(len(owner)))))
    scale = limit or used.max() or 1.0  # the solver's tolerances are absolute, so both sums are scaled to about one
    constraints = [LinearConstraint(one_each, 1, 1), LinearConstraint(used[None] / scale, -np.inf, limit / scale)]
    result = milp(objective / (objective.max() or 1.0), constraints=constraints, integrality=1, bounds=(0, 1))
    if result.x is None:
        return None
    starts = np.cumsum([0, *counts])
    return [int(result.x[start : start + count].argmax()) for start, count in zip(starts, counts, strict=False)]
