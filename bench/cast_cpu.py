"""How many elements a second does a CPU encode, both planes of a bf16 4096x4096?

python -m bench.cast_cpu [FORMAT ...]
"""

import sys

import torch

from bench.timing.duel import HostClock, Pace, alone
from bench.timing.records import emit
from duotone import formats
from duotone.dispatch.compiler import compiler_reason
from duotone.dispatch.stages import CHUNKED, COMPILED
from duotone.formats.elements import Stages

SIZE = 4096


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(SIZE, SIZE, dtype=torch.bfloat16)
    seed = torch.tensor([1])
    backends: list[Stages] = [CHUNKED] if compiler_reason() else [CHUNKED, COMPILED]
    for name in sys.argv[1:] or ["mxfp8_e4m3"]:
        fmt = formats.get(name)

        def both(stages: Stages, fmt: formats.Format = fmt) -> None:
            row = fmt.encode(x, seed=seed, stages=stages)
            if fmt.derive(row) is None:
                fmt.encode(x.t(), seed=seed, plane="col", stages=stages)

        for backend in backends:  # one after the other: each finds the allocator as it left it
            ms = alone(lambda b=backend, both=both: both(b), HostClock(), Pace(15, 0.02))
            rate = round(SIZE * SIZE / (1e6 * ms), 3)
            values = {"format": name, "backend": backend.name, "giga_elements_per_s": rate}
            emit("cpu", {"question": "both planes of a bf16 4096x4096 on CPU", **values})


if __name__ == "__main__":
    main()
