"""docs/accuracy-of-fp8-recipes.md shows the numbers of its record, and the record those of the code."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "accuracy-of-fp8-recipes.md").read_text()
RECORD = sorted((ROOT / "bench" / "results").glob("*-cpu-accuracy.jsonl"))[-1]
RECORDS = [json.loads(line) for line in RECORD.read_text().splitlines()]


@pytest.fixture
def accuracy(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("accuracy")


def test_the_table_of_the_page_is_that_of_the_newest_record(accuracy) -> None:
    assert f"`bench/results/{RECORD.name}`" in PAGE
    assert "\n\n" + "\n".join(accuracy.table(RECORDS)) + "\n\n" in PAGE
    record_rows = [(result["data"], result["recipe"]) for result in RECORDS]
    assert record_rows == [(data, recipe) for data in accuracy.DATA for recipe in accuracy.RECIPES]


@pytest.mark.parametrize(
    ("recipe", "data"), [("fp8-block, wgrad_input_128x128", "outliers x 10000"), ("fp8-rowwise", "positive")]
)
def test_the_record_is_what_the_code_gives(accuracy, recipe: str, data: str) -> None:
    (outcome,) = [each for each in RECORDS if (each["recipe"], each["data"]) == (recipe, data)]
    result = accuracy.measure(accuracy.RECIPES[recipe], data)
    for kind in ("error", "typical"):
        assert result[kind] == pytest.approx(outcome[kind], rel=1e-3)


def test_square_blocks_cost_nothing_until_features_differ_by_orders_of_magnitude() -> None:
    errors = {(result["recipe"], result["data"]): result["typical"]["dw"] for result in RECORDS}
    plain, square = "fp8-block", "fp8-block, wgrad_input_128x128"
    for data in ("normal", "positive", "outliers x 100"):
        assert errors[square, data] == pytest.approx(errors[plain, data], rel=1e-2)
    assert 1.4 < errors[square, "outliers x 10000"] / errors[plain, "outliers x 10000"] < 1.6
