"""FSDP2 and tensor parallelism on four gloo processes; fsdp_mesh_worker.py holds the checks."""

WORKER = "fsdp_mesh_worker.py"


def test_fsdp_mesh(failures, check) -> None:
    assert not failures(WORKER, check)
