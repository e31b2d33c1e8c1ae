"""Checks that need several processes: a worker script runs on gloo, each of its checks becomes one test."""

from pathlib import Path

import pytest
from launching import folder_of, launch, names

PROCESSES = {"amax_worker.py": 3, "checkpoint_worker.py": 4, "fsdp_mesh_worker.py": 4, "trainer_worker.py": 4}
"""Of workers that need more than two."""


@pytest.fixture(scope="session")
def failures(tmp_path_factory):
    """failures(worker, check) -> what went wrong in a check of a worker script, which runs once a session."""
    outcomes: dict[str, tuple[Path, dict[str, list[str]]]] = {}

    def of(worker: str, check: str) -> str:
        if worker not in outcomes:
            folder = tmp_path_factory.mktemp("ranks")
            outcomes[worker] = folder_of(worker, folder), launch([worker], folder, PROCESSES.get(worker, 2))
        return "\n".join(outcomes[worker][1][check])

    def folder(worker: str) -> Path:
        of(worker, next(iter(outcomes[worker][1])) if worker in outcomes else _first_check(worker))
        return outcomes[worker][0]

    of.folder = folder
    return of


def _first_check(worker: str) -> str:
    return names(worker)[0]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`check` takes every check of the module's WORKER."""
    if "check" in metafunc.fixturenames:
        metafunc.parametrize("check", names(metafunc.module.WORKER))
