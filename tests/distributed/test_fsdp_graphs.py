"""Compiled code under FSDP2 on two gloo processes; fsdp_graphs_worker.py holds the checks."""

WORKER = "fsdp_graphs_worker.py"


def test_every_check_of_the_worker_passes_on_all_ranks(failures, check) -> None:
    assert not failures(WORKER, check)
