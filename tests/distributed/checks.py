"""What worker scripts share: the group, and a report of named checks."""

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from duotone.dispatch import stages

DEVICE = sys.argv[4] if len(sys.argv) > 4 else "cpu"
"""Where a worker runs that knows both: "cpu", or "cuda" with a GPU for each rank."""
CHECKS: list[Callable[[Path], None]] = []


def check(function: Callable[[Path], None]) -> Callable[[Path], None]:
    CHECKS.append(function)
    return function


def main() -> None:
    """Run every check on this rank: worker.py FOLDER WORLD RANK DEVICE, as `launching.run` calls it."""
    folder, world, rank = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    stages.COMPILE_FROM = (
        1 << 20
    )  # each rank would compile the same casts; test_stages.py compares these with plain ones
    store = dist.FileStore(str(folder / "store"), world)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", store=store, rank=rank, world_size=world)
    for function in CHECKS:
        failures = []
        try:
            torch.manual_seed(7)
            function(folder)
        except Exception:
            failures = [f"rank {rank}: {traceback.format_exc()}"]
        print(json.dumps({"name": function.__name__, "failures": failures}), flush=True)
        dist.barrier()
    dist.destroy_process_group()


def same(got: torch.Tensor, want: torch.Tensor, what: str = "") -> None:
    assert got.shape == want.shape and got.dtype == want.dtype, f"{what}: {got.shape} {got.dtype}, {want.shape}"
    different = (got != want) & ~((got != got) & (want != want))
    assert not different.any(), f"{what}: {int(different.sum())} of {got.numel()} elements differ"
