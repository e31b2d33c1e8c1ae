"""One option for each group, the cheapest under a limit: an integer program, solved by HiGHS in scipy."""

from collections.abc import Sequence

from duotone.errors import UserError

Priced = tuple[float, float]
"""What an option adds to the objective, and to the limited sum."""


def require_solver() -> None:
    """UserError unless scipy is installed."""
    try:
        import scipy.optimize  # noqa: F401
    except ImportError as error:
        raise UserError("duotone search needs scipy, which is not installed: pip install 'scipy>=1.11'") from error


def choose_cheapest(groups: Sequence[Sequence[Priced]], limit: float) -> list[int] | None:
    """The place of the chosen option in each group, which has at least one; None if no choice meets the limit."""
    import numpy as np
    from scipy import sparse
    from scipy.optimize import LinearConstraint, milp

    objective, used = np.array([option for group in groups for option in group], dtype=float).T
    counts = [len(group) for group in groups]
    owner = np.repeat(np.arange(len(groups)), counts)
    one_each = sparse.csr_array((np.ones(len(owner)), (owner, np.arange(len(owner)))))
    scale = limit or used.max() or 1.0  # the solver's tolerances are absolute, so both sums get the size of one
    constraints = [LinearConstraint(one_each, 1, 1), LinearConstraint(used[None] / scale, -np.inf, limit / scale)]
    result = milp(objective / (objective.max() or 1.0), constraints=constraints, integrality=1, bounds=(0, 1))
    if result.x is None:
        return None
    starts = np.cumsum([0, *counts])
    return [int(result.x[start : start + count].argmax()) for start, count in zip(starts, counts, strict=False)]
