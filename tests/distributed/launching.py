"""Runs worker scripts on ranks, and collects what their checks say."""

import faulthandler
import gc
import itertools
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

HERE = Path(__file__).parent
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["duotone", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch._inductor.compile_fx"]
)
"""Ranks on a CPU are copies of one process, which imported these once. CUDA does not work in copies of a process."""
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def names(worker: str | Path) -> list[str]:
    """The checks that a worker script holds, in order."""
    lines = (HERE / worker).read_text().splitlines()
    return [after.split("(")[0].removeprefix("def ") for at, after in itertools.pairwise(lines) if at == "@check"]


def run(workers: Sequence[Path], folder: Path, world: int, rank: int, backend: str) -> None:
    """In the process of a rank: run the scripts, as if each had been started alone. They print to two files."""
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
    faulthandler.register(signal.SIGUSR1)  # prints where all threads are
    os.environ |= {"OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"}
    warnings.simplefilter("ignore")
    gc.freeze()  # what was imported: the collector walked over it again and again
    gc.set_threshold(20_000, 50, 100)
    torch._C._dynamo.guards.profile_guard_manager = lambda *arguments: 0.0  # as in conftest.py
    for worker in workers:
        sys.argv = [str(worker), str(folder_of(worker, folder)), str(world), str(rank), backend]
        runpy.run_path(str(worker), run_name="__main__")
    if dist.is_initialized():
        dist.destroy_process_group()


def folder_of(worker: str | Path, folder: Path) -> Path:
    """Where a worker writes, of those that run in `folder`."""
    part = folder / Path(worker).with_suffix("").name
    part.mkdir(exist_ok=True)
    return part


TORCHRUN = "import duotone_lab.cli.parallel_run\nfrom torch.distributed.run import main\nmain()"


def torchrun(script: Path, *arguments: object, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    """Run `script` on two ranks under torchrun. They are copies of its process, which has imported what they need."""
    options = "--standalone --nproc-per-node=2 --run-path --start-method=fork".split()
    command = [
        sys.executable,
        "-c",
        TORCHRUN,
        *options,
        f"--max-restarts={restarts}",
        str(script),
        *map(str, arguments),
    ]
    environment = {**os.environ, **NO_GPU, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=480, check=False)
    assert process.returncode == 0, process.stderr[-9000:]
    return process


def launch(
    workers: Sequence[str | Path],
    folder: Path,
    world: int = 2,
    timeout: float = 480,
    backend: str = "gloo",
    dies: Mapping[int, int] | None = None,
) -> dict[str, list[str]]:
    """Start `world` ranks, which run the workers in turn; gives the failures of each check, empty where all passed.

    `timeout`: seconds. `dies`: exit codes of ranks that are not 0.
    """
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch.distributed has no gloo here; install a torch build that has it: pip install torch")
    context = FORKS if backend == "gloo" else multiprocessing.get_context("spawn")
    if backend == "gloo":
        with mock.patch.dict(os.environ, NO_GPU):
            forkserver.ensure_running()
    scripts = [HERE / worker for worker in workers]
    ranks = [context.Process(target=run, args=(scripts, folder, world, rank, backend)) for rank in range(world)]
    for process in ranks:
        process.start()
    try:
        for rank, process in enumerate(ranks):
            process.join(timeout)
            if process.exitcode is None:
                raise TimeoutError(f"rank {rank} did not end in {timeout} seconds\n{whereabouts(ranks, folder)}")
            assert process.exitcode == (dies or {}).get(rank, 0), (
                f"rank {rank}: {(folder / f'{rank}.err').read_text()[-3000:]}"
            )
    finally:
        for process in ranks:
            process.kill()
    return results(folder, world)


def whereabouts(ranks: Sequence[BaseProcess], folder: Path) -> str:
    """The checks that failed on each rank, the last one that ended, and where its threads are."""
    for process in ranks:
        if process.is_alive() and process.pid:
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(1)
    parts = []
    for rank in range(len(ranks)):
        ended = lines_of(folder, rank)
        failed = [failure for check in ended for failure in check["failures"]]
        last = ended[-1]["name"] if ended else "the start"
        parts += [*failed, f"rank {rank}, after {last}: {(folder / f'{rank}.err').read_text()[-9000:]}"]
    return "\n".join(parts)


def lines_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    """What the checks of a rank printed of themselves."""
    lines = (folder / f"{rank}.out").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def results(folder: Path, world: int) -> dict[str, list[str]]:
    """The failures of each check on all ranks, from what they printed."""
    failures: dict[str, list[str]] = {}
    for rank in range(world):
        for check in lines_of(folder, rank):
            failures.setdefault(check["name"], []).extend(check["failures"])
    return failures
