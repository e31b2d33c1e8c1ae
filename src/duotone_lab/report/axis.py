"""A linear axis: limits, ticks at round numbers, and the pixel of each value."""

import math
from dataclasses import dataclass

from duotone_lab.report.numbers import number

LABEL_GAP = 17


@dataclass(frozen=True)
class Axis:
    """Values `low` to `high` laid over pixels `start` to `end`, with a tick each `step`."""

    low: float
    high: float
    start: float
    end: float
    step: float

    @classmethod
    def over(cls, low: float, high: float, pixels: tuple[float, float], ticks: int = 5, whole: bool = False) -> "Axis":
        """An axis that contains `low` to `high` and has about `ticks` ticks, at whole numbers if `whole`."""
        if high <= low:
            margin = abs(low) / 2 or 0.5
            low, high = low - margin, high + margin
        step = round_step((high - low) / ticks)
        return cls(low, high, *pixels, max(1.0, step) if whole else step)

    def position(self, value: float) -> float:
        """The pixel of `value`, limited to the axis."""
        limited = min(max(value, self.low), self.high)
        return self.start + (limited - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[tuple[float, str]]:
        """Each tick's value and text."""
        first, last = math.ceil(self.low / self.step - 1e-9), math.floor(self.high / self.step + 1e-9)
        values = [index * self.step for index in range(first, last + 1)]
        if not 1e-4 <= self.step < 1e6:
            return [(value, f"{value:.3g}") for value in values]
        digits = max(0, -math.floor(math.log10(self.step) + 1e-9))
        return [(value, number(value, digits if value else 0)) for value in values]


def round_step(raw: float) -> float:
    """The smallest of 1, 2 or 5 times a power of ten that is at least `raw`."""
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))


def round_out(low: float, high: float, ticks: int = 5) -> tuple[float, float]:
    """The closest limits around `low` and `high` that are themselves ticks."""
    if high <= low:
        high = low + max(1.0, 1e-6 * abs(low))  # a large number plus 1 is that number
    step = round_step((high - low) / ticks)
    return step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9)


def spread(targets: list[float], top: float, bottom: float) -> list[float]:
    """Ascending heights, a label apart and close to the `targets`, between `top` and `bottom`."""
    gap = min(LABEL_GAP, (bottom - top) / max(len(targets), 1))
    placed: list[float] = []
    for height in targets:
        placed.append(max(height, placed[-1] + gap if placed else top))
    limit = bottom
    for index in reversed(range(len(placed))):
        placed[index] = min(placed[index], limit)
        limit = placed[index] - gap
    return placed
