"""Sequences over a cp_group on two gloo processes; te_context_worker.py holds the checks."""

WORKER = "te_context_worker.py"


def test_every_check_of_the_worker_passes_on_all_ranks(failures, check) -> None:
    assert not failures(WORKER, check)
