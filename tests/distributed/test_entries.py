"""Entries of other libraries on two gloo processes; entries_worker.py holds the checks."""

import pytest

WORKER = "entries_worker.py"


def test_every_check_of_the_worker_passes_on_all_ranks(check, failures) -> None:
    for library in ("transformers", "accelerate", *(["lightning"] if check.startswith("fabric") else [])):
        pytest.importorskip(library, reason=f"pip install '.[{library}]'", exc_type=ImportError)
    assert not failures(WORKER, check)
