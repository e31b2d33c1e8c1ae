"""On GPUs: the checks of processes on a CPU. Workers of a group share one start.

They run over NCCL where each rank has a GPU. Ranks that share GPUs run over `staged`: NCCL refuses two on one.
"""

from pathlib import Path

import pytest
import staged
import torch
from launching import launch, names

OF_ATTENTION = ("../attention/context_worker.py", "../attention/parallel_worker.py")
GROUPS: list[tuple[int, tuple[str, ...]]] = [
    (2, ("fsdp_worker.py", "mesh_worker.py", "styles_worker.py")),
    (2, ("fsdp_ways_worker.py", "parallel_worker.py")),
    (2, ("fsdp_graphs_worker.py",)),
    (2, ("expert_worker.py", "pipeline_worker.py")),
    (2, ("te_worker.py", "te_context_worker.py", "amax_worker.py", "test_new_format.py")),
    *((world, workers) for world in (2, 4) for workers in (OF_ATTENTION, ("checkpoint_worker.py",))),
    *((world, ("trainer_worker.py",)) for world in (2, 4)),
    (4, ("fsdp_mesh_worker.py",)),
]
IDS = [f"{world}-{Path(workers[0]).stem}" for world, workers in GROUPS]


@pytest.mark.parametrize(("world", "workers"), GROUPS, ids=IDS)
def test_checks_of_workers(world, workers, tmp_path) -> None:
    # gloo, too: trainers reduce numbers on the host, and a save in the background needs it
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.device_count() >= world else staged.BACKEND
    # two ranks on one card take 175 s alone, and twice as long beside other tests
    results = launch(workers, tmp_path, world, timeout=480, backend=backend)
    failures = [f"{check}, {failure}" for check, failed in results.items() for failure in failed]
    assert not failures, "\n".join(failures)
    assert set(results) == {name for worker in workers for name in names(worker)}
