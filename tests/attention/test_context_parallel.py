"""Attention over ranks that share a sequence; context_worker.py holds the checks."""

from pathlib import Path

import pytest
from launching import launch, names

WORKER = Path(__file__).parent / "context_worker.py"


@pytest.mark.parametrize("world", [2, 4])
def test_a_sequence_over_ranks_gives_the_attention_of_one(tmp_path, world) -> None:
    failures = launch([WORKER], tmp_path, world)
    assert set(failures) == set(names(WORKER))
    assert not [failure for each in failures.values() for failure in each]
