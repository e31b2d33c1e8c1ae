"""FSDP2, tensor parallelism and a checkpoint on two gloo processes; brief_worker.py holds the checks."""

WORKER = "brief_worker.py"


def test_every_check_of_the_worker_passes_on_all_ranks(failures, check) -> None:
    assert not failures(WORKER, check)
