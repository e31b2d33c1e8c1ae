"""On two and four GPUs: the checks of processes on a CPU, over NCCL. Workers of a group share one start."""

import pytest
import torch
from launching import launch, names

OF_ATTENTION = ("../attention/context_worker.py", "../attention/parallel_worker.py")
GROUPS: list[tuple[int, tuple[str, ...]]] = [
    (2, ("fsdp_worker.py", "mesh_worker.py", "styles_worker.py")),
    (2, ("fsdp_ways_worker.py", "parallel_worker.py")),
    (2, ("expert_worker.py", "pipeline_worker.py")),
    (2, ("te_worker.py", "amax_worker.py", "test_new_format.py")),
    *((world, workers) for world in (2, 4) for workers in (OF_ATTENTION, ("checkpoint_worker.py",))),
    *((world, ("trainer_worker.py",)) for world in (2, 4)),
    (4, ("fsdp_mesh_worker.py",)),
]


@pytest.mark.parametrize(("world", "workers"), GROUPS)
def test_checks_of_workers(world, workers, tmp_path) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices; run `PYTHONPATH=src python -m pytest tests/gpu` on them")
    # gloo, too: trainers reduce numbers on the host, and a save in the background needs it
    failures = launch(workers, tmp_path, world, timeout=400, backend="cpu:gloo,cuda:nccl")
    assert set(failures) == {name for worker in workers for name in names(worker)}
    assert not [failure for failed in failures.values() for failure in failed]
