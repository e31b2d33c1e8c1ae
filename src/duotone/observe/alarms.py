"""Alarms: trouble that begins at a sampled step. Each kind and place is reported once."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from duotone.observe.step_statistics import Row

LEAST_GRADIENT_TO_NOISE = math.sqrt(3)
"""Below this, quantized training stops converging (arXiv 2505.19115)."""

MOST_CLIPPED = 0.001
"""The share of elements far above the largest value that their scale can represent."""

MOST_DRIFT = 3.0
"""The number of powers of two between an amax and its running mean."""

STEADY = 3
"""A running mean is used after so many sampled steps."""


@dataclass(frozen=True)
class Alarm:
    """A kind of trouble that begins at `step`: its worst or first place, and in how many `planes` or slots."""

    step: int
    kind: str
    where: str
    message: str
    planes: int

    def __str__(self) -> str:
        others = f" (and {self.planes - 1} more)" if self.planes > 1 else ""
        return f"step {self.step}, {self.kind}: {self.where}{others}: {self.message}"


@dataclass
class Alarms:
    """Compares each sampled step with earlier sampled steps."""

    _active: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The places of each kind that are in trouble, as far as they were last measured."""
    _means: dict[str, tuple[float, int]] = field(default_factory=dict)
    """The running mean of the size of each amax, and over how many steps."""
    _last: int | None = None

    def check(self, step: int, rows: Sequence[Row], dead: Sequence[str]) -> list[Alarm]:
        """The alarms that begin at `step`. A place repeats an alarm only after a measurement without that problem.

        `rows` are in the order of the step's encodes, so the first one that is not finite is the origin. Later ones are
        reported only after a step without any.
        """
        since = "" if self._last is None else f"; step {self._last} had none"
        troubles = {
            "not finite": [
                (place(row), f"{row['nan']} NaN and {row['inf']} infinite elements, the first of the step{since}")
                for row in rows
                if row["nan"] or row["inf"]
            ],
            "gradient to noise": [
                (
                    place(row),
                    f"the gradient is {ratio:.3g} times the error of its codes, less than the square root of 3",
                )
                for ratio, row in ranked(rows, "gradient_to_noise", -1)
                if ratio < LEAST_GRADIENT_TO_NOISE
            ],
            "saturation": [
                (place(row), f"{share:.2%} of the elements are more than 1.5 times what their scale can hold")
                for share, row in ranked(rows, "clipped", 1)
                if share > MOST_CLIPPED
            ],
            "amax drift": self._drift(rows),
            "dead slot": [(slot, "its delayed scale has met no amax but 0") for slot in dead if self._last is not None],
        }
        sampled = {place(row) for row in rows if "clipped" in row}  # each step measures the errors of some modules
        measured = {"gradient to noise": sampled, "saturation": sampled, "amax drift": {place(row) for row in rows}}
        begun: list[Alarm] = []
        for kind, places in troubles.items():
            active = self._active[kind]
            begins = [(where, message) for where, message in places if where not in active]
            if begins and not (kind == "not finite" and active):
                begun.append(Alarm(step, kind, *begins[0], len(begins)))
            remaining = active - measured[kind] if kind in measured else set[str]()
            self._active[kind] = remaining.union(where for where, _ in places)
        self._last = step
        return begun

    def _drift(self, rows: Sequence[Row]) -> list[tuple[str, str]]:
        """Amaxes far from their mean over earlier sampled steps. The last of these weighs a half."""
        drifts: list[tuple[float, str, str]] = []
        for amax, row in ranked(rows, "amax", 0):
            if amax <= 0:
                continue
            where, size = place(row), math.log2(amax)
            mean, count = self._means.get(where, (size, 0))
            if count >= STEADY and abs(size - mean) > MOST_DRIFT:
                drifts.append((abs(size - mean), where, f"the amax is {amax:.3g} after a mean of {2**mean:.3g}"))
            self._means[where] = (mean + size) / 2, count + 1
        return [(where, message) for _, where, message in sorted(drifts, reverse=True)]


def ranked(rows: Sequence[Row], name: str, sign: int) -> list[tuple[float, Row]]:
    """The rows with a number of that name: the largest first (1), the smallest first (-1), or in their order (0)."""
    values = [(float(value), row) for row in rows if (value := row.get(name)) is not None]
    return sorted(values, key=lambda pair: -sign * pair[0])


def place(row: Row) -> str:
    """Module, role and direction."""
    return f"{row['module'] or 'a linear'}, {row['role']} {row['plane']}"
