"""How many elements a second does a CPU encode, both planes of a bf16 4096x4096?

python bench/cast_cpu.py [FORMAT ...]
"""

import statistics
import sys

import torch

from _timing import record, turns
from duotone import formats
from duotone.dispatch.chunked import CHUNKED
from duotone.dispatch.compiled import COMPILED
from duotone.dispatch.compiler import compiler_reason
from duotone.formats.stages import Stages

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
            seconds = turns({backend.name: lambda b=backend, both=both: both(b)}, rounds=15)
            rate = SIZE * SIZE / statistics.median(seconds[backend.name])
            record(
                "both planes of a bf16 4096x4096 on CPU",
                format=name,
                backend=backend.name,
                giga_elements_per_s=round(rate / 1e9, 3),
            )


if __name__ == "__main__":
    main()
