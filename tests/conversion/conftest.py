"""Keeps casts uncompiled, and makes the helpers of this folder importable from its tests."""

import sys
from pathlib import Path

import pytest

from duotone.dispatch import stages

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """All backends give the same bits, and a compiler would take most of the time here."""
    monkeypatch.setattr(stages, "COMPILE_FROM", 1 << 40)
