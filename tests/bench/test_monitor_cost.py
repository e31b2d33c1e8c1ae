"""The bench of the monitor: a record with what its cost follows from."""

import json
import re
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


def test_the_page_has_the_numbers_of_the_record() -> None:
    root = Path(__file__).parents[2]
    text = (root / "docs/observing.md").read_text()
    (name,) = re.findall(r"bench/results/[0-9-]*h200-monitor\.jsonl", text)
    cells = {"8192x4096x14336x6": {}, "16384x2048x5632x24": {}}
    for record in map(json.loads, (root / name).read_text().splitlines()):
        message = f"{record['cost_percent']:.1f} % of time, {record['memory_percent']:.1f} % of memory"
        cells[record["shape"]][record["form"]] = message
    for forms in cells.values():
        assert f"| {forms['the rest compiled']} | {forms['compiled']} |" in text
