"""Entries of other libraries on two gloo processes; entries_worker.py holds the checks."""

import pytest

pytest.importorskip("transformers", reason="pip install '.[integrations]'")
WORKER = "entries_worker.py"


def test_entries(check, failures) -> None:
    assert not failures(WORKER, check)
