"""Scripts for Transformer Engine on two gloo processes; te_worker.py holds the checks."""

WORKER = "te_worker.py"


def test_te(failures, check) -> None:
    assert not failures(WORKER, check)
