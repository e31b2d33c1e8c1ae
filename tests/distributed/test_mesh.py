"""DTensor weights on two gloo processes; mesh_worker.py holds the checks."""

WORKER = "mesh_worker.py"


def test_mesh(failures, check) -> None:
    assert not failures(WORKER, check)
