"""Checks: the roll of delayed scaling, against the one in plain torch."""

import itertools

import torch
from interpreting import Check

from duotone.kernels import roll
from duotone.state import history
from duotone.tensor import History

NAN, INF = float("nan"), float("inf")
LARGEST = [448.0, 57344.0]
LIVE = [0.0, 1e-44, 3.0, 7.0, 900.0, 1e30, 3e38, INF, NAN]
LENGTHS = (1, 2, 8)
ALGORITHMS = ("max", "most_recent")


def histories(length: int) -> torch.Tensor:
    """A column for each live amax, with and without older entries that should not be."""
    older = torch.rand(length, len(LIVE) * 2) * 100
    older[1:, : len(LIVE) // 2] = 0.0
    if length > 2:
        older[1, len(LIVE) :] = INF
        older[2, len(LIVE) + 1 :] = NAN
    older[0] = torch.tensor(LIVE * 2)
    return older


def checks(everything: bool) -> Check:
    """Also of histories with infinities and NaN."""
    for length, algorithm, skip, spike in itertools.product(LENGTHS, ALGORITHMS, (0, 1), (0, 16.0)):
        margin = 3 if spike else 0
        parameters = History(margin, length, algorithm, skip_nonfinite_amax=bool(skip), spike_factor=spike)
        expected = histories(length)
        slots = expected.shape[1]
        scale, events = torch.rand(slots) + 1, torch.zeros(2, slots, dtype=torch.int32)
        rolled, moved, counted = expected.clone(), scale.clone(), events.clone()
        largest = (LARGEST * slots)[:slots]
        limit = torch.tensor(largest) * 2.0**-margin
        table = roll.addresses(rolled, moved, counted)
        for step in range(2):
            old = roll.roll(table, limit, length, algorithm != "max", bool(skip), spike)
            before = history.roll(expected, scale, largest, parameters, events)
            where = f"{length} {algorithm} {skip} {spike} {margin} {step}"
            yield f"before {where}", old, before
            yield f"history {where}", rolled, expected
            yield f"scale {where}", moved, scale
            yield f"events {where}", counted, events
            expected[0], rolled[0] = 5.0, 5.0
