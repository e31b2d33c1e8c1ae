"""Collectives of ranks that share a card, on two gloo processes; staged_worker.py holds the checks."""

WORKER = "staged_worker.py"


def test_staged(failures, check) -> None:
    assert not failures(WORKER, check)
