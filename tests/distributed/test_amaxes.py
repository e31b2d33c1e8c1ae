"""Delayed amaxes over process groups of three gloo processes; amax_worker.py holds the checks."""

WORKER = "amax_worker.py"


def test_every_check_of_the_worker_passes_on_all_ranks(failures, check) -> None:
    assert not failures(WORKER, check)
