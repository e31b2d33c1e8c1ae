"""The speeds that ship are those of a dated record. `python tests/observe/test_speeds.py` writes them anew."""

import json
from collections import defaultdict
from pathlib import Path
from statistics import median

import pytest

import duotone
from duotone import recipes
from duotone.observe import speeds

ROOT = Path(__file__).parents[2]
SOURCE = "bench/results/2026-11-21-h200-layers-late.jsonl"
SHIPPED = Path(duotone.__file__).parent / "observe" / "speeds.json"


def recorded() -> str:
    """The speed of each linear under each recipe, one a line; the median where it was measured more than once."""
    rows = [json.loads(line) for line in (ROOT / SOURCE).read_text().splitlines()]
    rows = [row for row in rows if row["what"] == "linear" and not row["error"] and row["ratio"]]
    ratios = defaultdict(list)
    for row in rows:
        if row["candidate"] in recipes.names():
            ratios[(*map(int, row["shape"].split("x")), row["candidate"])].append(row["ratio"])
    ratios |= {(*shape, "bf16"): [1.0] for shape in {key[:3] for key in ratios}}
    head = {"source": SOURCE, "device": rows[0]["device"], "date": rows[0]["date"][:10], "torch": rows[0]["torch"]}
    lines = [json.dumps([*key, round(median(values), 3)]) for key, values in sorted(ratios.items())]
    return json.dumps(head)[:-1] + ', "linears": [\n' + ",\n".join(lines) + "\n]}\n"


def test_the_table_is_that_of_its_record() -> None:
    assert SHIPPED.read_text() == recorded(), "if the record is meant to change: python tests/observe/test_speeds.py"


def test_a_measured_shape_is_that_of_the_record() -> None:
    rows = [json.loads(line) for line in (ROOT / SOURCE).read_text().splitlines()]
    key = ("linear", "fp8-current", "8192x4096x14336")
    ratios = [row["ratio"] for row in rows if (row["what"], row["candidate"], row["shape"]) == key]
    speed = speeds.measured().speed("fp8-current", (8192, 4096, 14336))
    assert (speed.ratio, speed.basis) == (pytest.approx(sum(ratios) / 2, abs=5e-4), "measured")
    assert speeds.measured().device == "NVIDIA H200" and speeds.measured().date == "2026-11-21"


TABLE = speeds.SpeedTable("GPU", "", "", {"a": {(1024, 1024, 1024): 1.0, (1024, 1024, 4096): 2.0}})


def test_between_two_shapes_the_speed_is_interpolated_over_the_logarithm_of_the_work() -> None:
    assert TABLE.speed("a", (1024, 1024, 2048)) == speeds.Speed(pytest.approx(1.5), "interpolated")
    assert TABLE.speed("a", (2048, 1024, 1024)).ratio == pytest.approx(1.5)


@pytest.mark.parametrize("shape", [(512, 1024, 1024), (1024, 4096, 4096)])
def test_outside_of_the_measured_shapes_nothing_is_known(shape: speeds.Shape) -> None:
    assert TABLE.speed("a", shape) == speeds.UNKNOWN and TABLE.speed("b", (1024, 1024, 1024)) == speeds.UNKNOWN


def test_a_model_takes_the_time_of_its_linears_together() -> None:
    square, wide = (1024, 1024, 1024), (1024, 1024, 4096)
    speed = TABLE.model_speed([("a", square), ("a", square), ("a", wide)])
    assert speed.ratio == pytest.approx((2 + 4) / (2 / 1.0 + 4 / 2.0)) and speed.basis == "measured"
    assert TABLE.model_speed([("a", square), ("a", (1024, 8, 8))]) == TABLE.model_speed([]) == speeds.UNKNOWN


if __name__ == "__main__":
    SHIPPED.write_text(recorded())
