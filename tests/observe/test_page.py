"""docs/observing.md: its examples run, and print what the page says."""

import json
import re
from pathlib import Path

import torch

from duotone import observe, recipes

PAGE = (Path(__file__).parents[2] / "docs" / "observing.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
_, MONITOR, TAPS, LEDGER = (text for kind, text in BLOCKS if kind == "python")


def test_the_monitor_of_the_page_writes_the_steps_that_it_says(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(MONITOR, {})
    rows = [json.loads(line) for line in (tmp_path / "monitor.jsonl").read_text().splitlines()]
    assert list(dict.fromkeys(row["step"] for row in rows)) == [1, 50, 100]
    documented = {key for line in PAGE.splitlines() if line.startswith("| `") for key in re.findall(r"`(\w+)`", line)}
    assert {key for row in rows for key in row} <= documented


def test_the_tap_of_the_page_prints_a_row_for_each_plane(capsys) -> None:
    names: dict[str, object] = {}
    exec(TAPS, names)
    lines = capsys.readouterr().out.splitlines()
    # The input of the first linear needs no gradient: no columnwise weight, no rowwise grad_output.
    assert len(lines) == 2 * 3 * 2 - 2 and all(re.search(r"\d\d\.\d dB$", line) for line in lines)
    assert isinstance(names["store"], observe.Tap) and {row["samples"] for row in names["store"].rows()} == {2}


def test_the_table_of_the_page_names_every_key() -> None:
    store = observe.Tap()
    quantizer = observe.with_statistics(recipes.load("mxfp8"), store)(recipes.QuantizerRole("linear", "input", "a"))
    quantizer.encode(torch.ones(4, 32))
    documented = {key for line in PAGE.splitlines() if line.startswith("| `") for key in re.findall(r"`(\w+)`", line)}
    assert set(store.rows()[0]) <= documented


def test_the_ledger_of_the_page_prints_what_it_says(capsys) -> None:
    exec(LEDGER, {})
    (output,) = (text for kind, text in BLOCKS if kind == "text")
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == output.splitlines()
