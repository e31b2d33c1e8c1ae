"""The trainer of `duotone train --parallel` on four gloo processes; trainer_worker.py holds the checks."""

from launching import names

WORKER = "trainer_worker.py"


def test_every_check_of_the_worker_passes_on_all_ranks(failures) -> None:
    assert not [text for text in (failures(WORKER, one) for one in names(WORKER)) if text]
