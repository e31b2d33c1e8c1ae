"""Scripts for Transformer Engine on two gloo processes; te_worker.py holds the checks."""

WORKER = "te_worker.py"


def test_every_check_of_the_worker_passes_on_all_ranks(failures, check) -> None:
    assert not failures(WORKER, check)
