"""DTensor weights on two gloo processes; mesh_worker.py holds the checks.

One test, so that the processes start once, also where several workers of pytest share the tests.
"""

from launching import names

WORKER = "mesh_worker.py"


def test_every_check_of_the_worker_passes_on_all_ranks(failures) -> None:
    assert not [text for text in (failures(WORKER, one) for one in names(WORKER)) if text]
