"""Starts a worker script once per rank, and collects what its checks say."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

HERE = Path(__file__).parent


def names(worker: str) -> list[str]:
    """The checks that a worker script holds, in order."""
    lines = (HERE / worker).read_text().splitlines()
    return [after.split("(")[0].removeprefix("def ") for at, after in itertools.pairwise(lines) if at == "@check"]


def launch(
    worker: str, folder: Path, world: int = 2, timeout: float = 240, device: str = "cpu"
) -> dict[str, list[str]]:
    """Run `worker` once per rank; gives the failures of each check, empty where all ranks passed."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch.distributed has no gloo here; install a torch build that has it: pip install torch")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["NCCL_NVLS_ENABLE"] = "0"
    command = [sys.executable, "-W", "ignore", str(HERE / worker), str(folder), str(world)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), device], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
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
