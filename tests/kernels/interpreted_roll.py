"""A script: the roll of delayed scaling in Triton's interpreter on the CPU, against the one in plain torch.

Prints each difference, then how many comparisons were made.
"""

import itertools
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined

import numpy as np
import torch
from interpreted import bits
from interpreted_segments import launched, patched, scalar
from triton.runtime import interpreter

from duotone.kernels import roll
from duotone.kernels.launch import Launch
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


def main() -> int:
    np.seterr(all="ignore")
    interpreter._patch_lang_tensor, interpreter._implicit_cvt = patched, scalar
    Launch.__call__ = launched
    torch.manual_seed(0)
    checks = differ = 0
    for length, algorithm, skip, spike in itertools.product(LENGTHS, ALGORITHMS, (0, 1), (0, 16.0)):
        margin = 3 if spike else 0
        parameters = History(margin, length, algorithm, skip_nonfinite_amax=bool(skip), spike_factor=spike)
        here = histories(length)
        slots = here.shape[1]
        scale, events = torch.rand(slots) + 1, torch.zeros(2, slots, dtype=torch.int32)
        there, moved, counted = here.clone(), scale.clone(), events.clone()
        largest = (LARGEST * slots)[:slots]
        limit = torch.tensor(largest) * 2.0**-margin
        for step in range(2):
            old = roll.roll(there, moved, counted, limit, algorithm != "max", bool(skip), spike)
            before = history.roll(here, scale, largest, parameters, events)
            for part, a, b in zip(
                ("before", "history", "scale", "events"),
                (before, here, scale, events),
                (old, there, moved, counted),
                strict=True,
            ):
                checks += 1
                numbers = a == a
                if not torch.equal(bits(a[numbers]), bits(b[numbers])) or not torch.equal(numbers, b == b):
                    differ += 1
                    print(part, length, algorithm, skip, spike, margin, step)
            here[0], there[0] = 5.0, 5.0
    print(f"{checks} comparisons, {differ} differ")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
