"""Quantities of quantized planes that a table can show: the worst of several planes, its text and its colour."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from duotone.observe.alarms import LEAST_GRADIENT_TO_NOISE
from duotone_lab.report.numbers import broken, finite, number, share, significant
from duotone_lab.training.schema import PlaneEntry

SHADES = (0.001, 0.01, 0.05, 0.2)
"""A share is shaded one step more above each of these."""

COLOURS = 10
"""Steps of the scale of signal-to-noise, from the lowest value of all recipes to the highest."""


@dataclass(frozen=True)
class Cell:
    """The text of one value, and the class of its colour."""

    text: str
    shade: str = ""


@dataclass(frozen=True)
class Metric:
    """A quantity of planes that a table can show: its name, its note and its worst value of several planes."""

    title: str
    note: str
    worst: Callable[[Sequence[PlaneEntry]], float | None]
    draw: Callable[[float | None, tuple[float, float]], Cell]


def _largest(values: Iterable[float | None]) -> float | None:
    """The largest value. NaN if a value is NaN, None if the sequence is empty."""
    numbers = (value for value in values if value is not None)
    return max(numbers, key=lambda value: math.inf if math.isnan(value) else value, default=None)


def _signal(entries: Sequence[PlaneEntry]) -> float | None:
    noise = _largest(None if entry["snr_db"] is None else -entry["snr_db"] for entry in entries)
    return None if noise is None else -noise


def _gradient_to_noise(entries: Sequence[PlaneEntry]) -> float | None:
    signal = _signal([entry for entry in entries if entry["role"] == "grad_output"])
    return 10 ** (min(signal, 1000.0) / 20) if signal is not None else None


def _draw_signal(value: float | None, limits: tuple[float, float]) -> Cell:
    if value is None or value == math.inf:
        return Cell("exact")
    if broken(value):
        return Cell(number(value), "bad")
    low, high = limits
    return Cell(number(value, 1), f"v{min(COLOURS - 1, max(0, int((value - low) / (high - low) * COLOURS)))}")


def _draw_share(value: float | None, _: tuple[float, float]) -> Cell:
    level = sum(value > limit for limit in SHADES) if finite(value) else 0
    return Cell(share(value), "bad" if broken(value) else f"w{level}" if level else "")


def _draw_gradient(value: float | None, _: tuple[float, float]) -> Cell:
    if value is None:
        return Cell(number(value))
    return Cell(significant(value), "bad" if not value >= LEAST_GRADIENT_TO_NOISE else "")


def _draw_plain(value: float | None, _: tuple[float, float]) -> Cell:
    return Cell(significant(value), "bad" if broken(value) else "")


METRICS = (
    Metric(
        "signal-to-noise",
        "How much larger a tensor is than the error that its format made, in dB: higher is better, 6 dB is one bit.",
        _signal,
        _draw_signal,
    ),
    Metric(
        "underflow",
        "The share of nonzero elements that became zero, in percent.",
        lambda entries: _largest(entry["underflow"] for entry in entries),
        _draw_share,
    ),
    Metric(
        "saturation",
        "The share of elements larger than their scale can hold, in percent.",
        lambda entries: _largest(entry["saturation"] for entry in entries),
        _draw_share,
    ),
    Metric(
        "dynamic range",
        "Powers of two between the largest and the smallest nonzero element.",
        lambda entries: _largest(entry.get("dynamic_range_bits") for entry in entries),
        _draw_plain,
    ),
    Metric(
        "bias",
        "The sum of all errors over the sum of all magnitudes, in percent: what rounding moves in one direction.",
        lambda entries: _largest(None if (bias := entry.get("bias")) is None else abs(bias) for entry in entries),
        _draw_share,
    ),
    Metric(
        "1 - cosine",
        "One minus the cosine between the tensor and what its codes stand for, times a million.",
        lambda entries: _largest(
            None if (cosine := entry.get("cosine")) is None else 1e6 * (1 - cosine) for entry in entries
        ),
        _draw_plain,
    ),
    Metric(
        "gradient to noise",
        "Of gradients, their norm over that of the error. Below 1.73, the square root of 3, quantized training stops "
        "to converge (arXiv 2505.19115).",
        _gradient_to_noise,
        _draw_gradient,
    ),
)
