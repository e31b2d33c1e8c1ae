"""torch's styles on Duotone's modules, two gloo processes; styles_worker.py holds the checks. One test starts them."""

from launching import names

WORKER = "styles_worker.py"


def test_every_check_of_the_worker_passes_on_all_ranks(failures) -> None:
    assert not [text for text in (failures(WORKER, one) for one in names(WORKER)) if text]
