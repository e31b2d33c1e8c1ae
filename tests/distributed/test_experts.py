"""Expert parallelism on two gloo processes; expert_worker.py holds the checks. One test starts them."""

from launching import names

WORKER = "expert_worker.py"


def test_every_check_of_the_worker_passes_on_all_ranks(failures) -> None:
    assert not [text for text in (failures(WORKER, one) for one in names(WORKER)) if text]
