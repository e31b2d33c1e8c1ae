"""Checks that need several processes: a worker script runs on gloo, each of its checks becomes one test."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

HERE = Path(__file__).parent
PROCESSES = {"amax_worker.py": 3, "fsdp_mesh_worker.py": 4}
"""Of workers that need more than two."""


@pytest.fixture(scope="session")
def failures(tmp_path_factory):
    """failures(worker, check) -> what went wrong in a check of a worker script, which runs once a session."""
    done: dict[str, tuple[Path, dict[str, list[str]]]] = {}

    def of(worker: str, check: str) -> str:
        if worker not in done:
            folder = tmp_path_factory.mktemp("ranks")
            done[worker] = folder, launch(worker, folder, PROCESSES.get(worker, 2))
        return "\n".join(done[worker][1][check])

    def folder(worker: str) -> Path:
        of(worker, next(iter(done[worker][1])) if worker in done else _first_check(worker))
        return done[worker][0]

    of.folder = folder
    return of


def names(worker: str) -> list[str]:
    """The checks that a worker script holds, in order."""
    lines = (HERE / worker).read_text().splitlines()
    return [after.split("(")[0].removeprefix("def ") for at, after in itertools.pairwise(lines) if at == "@check"]


def _first_check(worker: str) -> str:
    return names(worker)[0]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`check` takes every check of the module's WORKER."""
    if "check" in metafunc.fixturenames:
        metafunc.parametrize("check", names(metafunc.module.WORKER))


def launch(worker: str, folder: Path, world: int = 2, timeout: float = 240) -> dict[str, list[str]]:
    """Run `worker` once per rank; gives the failures of each check, empty where all ranks passed."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch.distributed has no gloo here; install a torch build that has it: pip install torch")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", str(HERE / worker), str(folder), str(world)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(world)
    ]
    found: dict[str, list[str]] = {}
    for rank, process in enumerate(ranks):
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            for each in ranks:
                each.kill()
            raise
        assert process.returncode == 0, f"rank {rank}: {err[-3000:]}"
        for line in out.splitlines():
            if line.startswith("{"):
                check = json.loads(line)
                found.setdefault(check["name"], []).extend(check["failures"])
    return found
