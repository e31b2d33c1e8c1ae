"""Distributed checkpoints on four gloo processes; checkpoint_worker.py holds the checks. One test starts them."""

from launching import names

WORKER = "checkpoint_worker.py"


def test_checkpoints(failures) -> None:
    assert not [text for text in (failures(WORKER, one) for one in names(WORKER)) if text]
