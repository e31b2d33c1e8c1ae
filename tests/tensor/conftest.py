"""Makes the helper of this folder importable from its tests, and keeps small tensors on one thread, uncompiled."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from duotone.dispatch import stages

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine cost more than these tensors gain from them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """All backends give the same bits, and a compiler would take most of the time here."""
    monkeypatch.setattr(stages, "COMPILE_FROM", 1 << 40)
