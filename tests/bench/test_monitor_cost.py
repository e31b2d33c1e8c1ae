"""The bench of the monitor: a record with what its cost follows from."""

from pathlib import Path

import pytest

from bench import monitor
from duotone import recipes


def test_a_record_has_the_cost_of_time_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duotone.dispatch.stages.compiler_reason", lambda: "off in this test")
    monkeypatch.setattr(monitor, "STEPS", 2)
    monkeypatch.setattr(monitor, "TURNS", 1)
    monkeypatch.setattr(monitor, "WARM", 1)
    monkeypatch.setitem(monitor.FORMS, "compiled", lambda model: model)
    record = monitor.measure("cpu", (32, 64, 64, 1), recipes.load("mxfp8"), "compiled", tmp_path)
    assert (record["shape"], record["recipe"], record["form"]) == ("32x64x64x1", "mxfp8", "compiled")
    assert len(record["costs_percent"]) == 1 and record["cost_percent"] == record["costs_percent"][0]
    assert record["memory_percent"] is None and record["ms"] > 0
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["0.jsonl", "warm.jsonl"]
