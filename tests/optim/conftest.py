"""Keeps casts uncompiled, and makes the helper of this folder importable from its tests."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from duotone.dispatch import stages
from duotone.state.rolling import pending

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """All backends give the same bits, and a compiler would take most of the time here."""
    monkeypatch.setattr(stages, "COMPILE_FROM", 1 << 40)


@pytest.fixture(autouse=True)
def _nothing_stays_pending() -> Iterator[None]:
    yield
    pending().backward.clear()
