"""What worker scripts share: the group, and a report of named checks."""

import gc
import json
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import staged
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from duotone.dispatch import stages
from duotone.errors import UserError

BACKEND = sys.argv[4] if len(sys.argv) > 4 else "gloo"
"""Of the process group. Workers run on any: "gloo", "nccl", "cpu:gloo,cuda:nccl", and `staged.BACKEND`."""
DEVICE = "cuda" if "nccl" in BACKEND or BACKEND == staged.BACKEND else "cpu"
"""Where tensors and modules lie by default. Each rank has its GPU, or they share one under `staged.BACKEND`."""
CHECKS: list[Callable[[Path], None]] = []


def check(function: Callable[[Path], None]) -> Callable[[Path], None]:
    CHECKS.append(function)
    return function


def start(folder: Path, world: int, rank: int, timeout: timedelta | None = None) -> None:
    """Join the process group, unless a worker before this one did."""
    if dist.is_initialized():
        return
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    if BACKEND == staged.BACKEND:
        staged.install()
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world, timeout=timeout)


def main(device: str = DEVICE) -> None:
    """Run every check on this rank: worker.py FOLDER WORLD RANK BACKEND, as `launching.run` calls it.

    `device`: where tensors lie by default.
    """
    folder, world, rank = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    stages.COMPILE_FROM = 1 << 20  # else ranks compile the same casts; test_stages.py compares these
    start(folder, world, rank)
    torch.set_default_device(None if device == "cpu" else device)
    for function in CHECKS:
        failures = []
        try:
            torch.manual_seed(7)
            gc.collect()  # amaxes of a forward alone would roll with a backward of this check, on some ranks only
            function(folder)
        except Exception:
            failures = [f"rank {rank}: {traceback.format_exc()}"]
        print(json.dumps({"name": function.__name__, "failures": failures}), flush=True)
        dist.barrier()
    CHECKS.clear()


def mesh() -> DeviceMesh:
    """All ranks, in one dimension."""
    return init_device_mesh(DEVICE, (dist.get_world_size(),))


def seeded(seed: int) -> torch.Generator:
    """Of the device on which tensors lie."""
    return torch.Generator(DEVICE).manual_seed(seed)


def same(result: torch.Tensor, want: torch.Tensor, what: str = "") -> None:
    """Equal bits; NaN equals NaN. They may lie on different devices."""
    assert result.shape == want.shape and result.dtype == want.dtype, (
        f"{what}: {result.shape} {result.dtype}, {want.shape}"
    )
    result, want = result.cpu(), want.cpu()
    different = (result != want) & ~((result != result) & (want != want))
    assert not different.any(), f"{what}: {int(different.sum())} of {result.numel()} elements differ"


def same_product(result: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Equal bits. On a GPU, products of another size may add in another order."""
    if DEVICE == "cpu":
        same(result, want, what)
    else:
        close(result, want, 2.0**-7, what)


def close(result: torch.Tensor, want: torch.Tensor, bound: float, what: str) -> None:
    """The norm of the error, relative to that of the wanted tensor, is at most `bound`. A DTensor is gathered."""
    result = result.full_tensor() if isinstance(result, DTensor) else result
    error = float((result.double() - want.double()).norm() / want.double().norm())
    assert error <= bound, f"{what}: relative error {error} above {bound}"


def refused(call: Callable[[], object], words: str, kind: type[Exception] = UserError) -> None:
    """The call fails with one line that has these words."""
    try:
        call()
    except kind as error:
        assert words in str(error) and "\n" not in str(error), error
    else:
        raise AssertionError(f"nothing was refused: {words}")
