"""Delayed amaxes over process groups of three gloo processes; amax_worker.py holds the checks."""

WORKER = "amax_worker.py"


def test_amaxes(failures, check) -> None:
    assert not failures(WORKER, check)
