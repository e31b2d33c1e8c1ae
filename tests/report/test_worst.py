"""The worst planes of a run, and that the rules which the page proposes do what they promise."""

from pathlib import Path
from typing import Any

import pytest
import torch

import duotone
from duotone import observe, recipes
from duotone.recipes import Recipe
from duotone.recipes.roles import PLANES_OF_GEMM
from duotone_lab.report import worst
from duotone_lab.training import models, presets

PRESET = presets.get("tiny")


def observed(recipe: Recipe) -> dict[str, Any]:
    """A run with the statistics of one step of the tiny model."""
    model = duotone.convert(models.build("gpt", PRESET, 0).bfloat16(), recipe)
    tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    store = observe.Tap()
    with duotone.autocast(recipe=observe.with_statistics(recipe, store)):
        model(tokens, tokens).backward()
    return {"name": recipe.name, "statistics": store.rows()}


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    return [observed(recipes.load(name)) for name in ("nvfp4", "mxfp8")]


def signal(run: dict[str, Any], weak: worst.Weak) -> float:
    place = (weak.entry["module"], weak.entry["role"], weak.entry["plane"])
    (row,) = [row for row in run["statistics"] if (row["module"], row["role"], row["plane"]) == place]
    return row["snr_db"]


def test_the_worst_are_the_lowest_of_all(runs: list[dict[str, Any]]) -> None:
    weak = worst.worst(runs[0], runs[1:])
    values = sorted(row["snr_db"] for row in runs[0]["statistics"] if row["snr_db"] is not None)
    assert [one.entry["snr_db"] for one in weak] == values[:5]
    assert all("stochastic" in one.reason or "%" in one.reason for one in weak)


def test_the_rules_load_and_give_those_planes_what_they_promise(runs: list[dict[str, Any]], tmp_path: Path) -> None:
    weak = worst.worst(runs[0], runs[1:])
    path = tmp_path / "mended.toml"
    path.write_text(worst.rules(runs[0], weak))
    mended = observed(recipes.load(str(path)))
    assert mended["name"] == "nvfp4-mended"
    for one in weak:
        assert "as in mxfp8" in one.remedy and one.operands == ("mxfp8_e4m3", "mxfp8_e4m3")
        assert signal(mended, one) > signal(runs[0], one) + worst.BETTER
    changed = {(one.entry["module"], *side) for one in weak for side in PLANES_OF_GEMM[one.gemm]}
    before, after = (
        {(row["module"], row["role"], row["plane"]): row["format"] for row in run["statistics"]}
        for run in (runs[0], mended)
    )
    assert {place for place in before if before[place] != after[place]} == changed


def test_where_nothing_does_better_high_precision_is_proposed(runs: list[dict[str, Any]], tmp_path: Path) -> None:
    weak = worst.worst(runs[1], runs[:1], most=1)
    assert weak[0].operands == ("identity", "identity") and "no compared recipe" in weak[0].remedy
    path = tmp_path / "mended.toml"
    path.write_text(worst.rules(runs[1], weak))
    place = (weak[0].entry["module"], weak[0].entry["role"], weak[0].entry["plane"])
    rows = observed(recipes.load(str(path)))["statistics"]
    assert [row["snr_db"] for row in rows if (row["module"], row["role"], row["plane"]) == place] in ([], [None])


def test_reasons_tell_saturation_and_underflow_first() -> None:
    entry: Any = {"format": "nvfp4", "saturation": 0.02, "underflow": 0.3, "dynamic_range_bits": 21.2}
    assert worst.reason(entry) == (
        "2.0 % of the elements exceed what their scale can hold; 30.0 % become zero: values span 21 powers of two"
    )
    quiet: Any = {"format": "fp8_e5m2_tensor", "saturation": 0.0, "underflow": None}
    assert worst.reason(quiet) == "e5m2 under a scale for each tensor has no more precision"
    assert worst.reason({**quiet, "format": "of a plug-in"}) == ""
