"""On two and four GPUs: DTensor weights and attention over NCCL, with the checks of processes on a CPU."""

import pytest
import torch
from launching import launch, names

WORKERS = {"mesh_worker.py": 2, "../attention/context_worker.py": 2, "fsdp_mesh_worker.py": 4}


@pytest.mark.parametrize("worker", WORKERS)
def test_checks_of_a_worker(worker, tmp_path) -> None:
    world = WORKERS[worker]
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices; run `PYTHONPATH=src python -m pytest tests/gpu` on them")
    failures = launch(worker, tmp_path, world, device="cuda")
    assert set(failures) == set(names(worker))
    assert not [failure for failed in failures.values() for failure in failed]
