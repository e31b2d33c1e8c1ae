import json
import math
from pathlib import Path

import pytest

from duotone import recipes
from duotone.observe.candidates import file_text, formats_of, load_candidates
from duotone.recipes import HighPrecision
from duotone_lab.training.goal import Goal
from duotone_lab.training.loop import Run
from duotone_lab.training.searching import Finding, Search, nats_per_e_fold
from duotone_lab.training.sensitivity import Effect

pytest.importorskip("scipy", reason="pip install 'scipy>=1.11'")

CURVE = [(step, 5 - 0.25 * math.log(step)) for step in range(1, 401)]


def test_a_loss_that_falls_with_the_logarithm_of_the_steps_has_the_slope_of_it():
    assert nats_per_e_fold(CURVE) == pytest.approx(0.25, rel=0.1)
    assert nats_per_e_fold([(1, 3.0), (2, 2.0)]) == 0.0  # too short to tell
    assert nats_per_e_fold([(step, 1.0 + step) for step in range(8)]) == 0.0  # rises


@pytest.fixture
def search(config):
    """Every GEMM costs 1 mnat or 1 % of progress in each format but those of layer 0, which cost ten times as much."""
    search = Search(config, Goal("speed", 1.15), load_candidates("", ["fp8-current", "fp8-block"]), (4096, 8192), 2)
    for (module, gemm), choices in search.options.items():
        weight = 10 if module.startswith("layers.0") else 1
        for option in choices:
            size = weight if option.recipe != "bf16" else 0
            nats, lost = (1e-3 * size, 0.0) if gemm == "fprop" else (0.0, 1e-2 * size)
            search.effects.append(Effect(module, gemm, option.recipe, nats, lost))
    return search


REFERENCE = Run("bf16", HighPrecision(), train_loss=CURVE, heldout_loss=[(400, 4.0)], is_reference=True)


def test_the_recipe_quantizes_what_costs_least_until_it_is_fast_enough(search, tmp_path):
    finding = search.conclude(REFERENCE)
    quantized = {gemm: option for gemm, option in finding.chosen.items() if option.recipe != "bf16"}
    assert finding.predicted.speed >= 1.15 and all(module.startswith("layers.1") for module, _ in quantized)
    rate = nats_per_e_fold(CURVE)
    expected = sum(1e-3 if gemm == "fprop" else 1e-2 * rate for _, gemm in quantized)
    assert finding.predicted.gap_percent == pytest.approx(100 * expected / 4.0)
    assert finding.uniform.keys() == {"bf16", "fp8-current", "fp8-block"}
    assert finding.uniform["bf16"].gap_percent == 0.0 and finding.uniform["fp8-current"].speed > 1.2


def test_the_file_gives_each_gemm_the_formats_of_its_option(search, tmp_path):
    finding = search.conclude(REFERENCE)
    path = tmp_path / "a.toml"
    path.write_text(file_text(finding.recipe.title, finding.recipe.rules))
    recipe = recipes.load(str(path))
    assert recipe == finding.recipe
    for gemm, option in finding.chosen.items():
        assert formats_of(recipe, gemm) == option.formats


def entry(gap, margin, seeds):
    return {"name": "searched", "gap_percent": gap, "gap_margin": margin, "gaps": [[s, gap] for s in range(seeds)]}


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (entry(0.5, 0.1, 3), "± 0.100 over 3 seeds: off by -0.500 points, outside of the interval."),
        (entry(0.05, 0.1, 2), "± 0.100 over 2 seeds: off by -0.050 points, inside of the interval."),
        (entry(-0.2, None, 1), "measured -0.200 % with one seed: off by +0.200 points, which one seed cannot judge."),
        (entry(None, None, 0), "The prediction was not checked: the comparison has no gap."),
    ],
)
def test_the_verdict_tells_how_far_off_the_prediction_was(search, measured, words):
    finding = search.conclude(REFERENCE)
    finding.predicted = type(finding.predicted)(0.0, 1.2, 1.0)
    finding.document = {"runs": [measured], "partial": False}
    assert isinstance(finding, Finding) and finding.verdict.endswith(words)


def test_the_page_has_the_numbers_of_the_record():
    root = Path(__file__).parents[2]
    lines = (root / "bench/results/2026-11-22-cpu-search.jsonl").read_text().splitlines()
    search, *uniform = map(json.loads, lines)
    page = (root / "docs/choosing.md").read_text()
    rows = {"searched": (search["predicted"], search["measured"])}
    rows |= {f"`{row['uniform']}`": (search["uniform"][row["uniform"]], row) for row in uniform}
    for name, (predicted, measured) in rows.items():
        gap = f"{measured['gap_percent']:+.3f} ± {measured['gap_margin']:.3f} %"
        assert f"| {name} | {predicted['gap_percent']:+.3f} % | {gap} | {predicted['speed']:.2f} |" in page
    seeds = (root / "bench/results/2026-11-22-cpu-search-seeds.jsonl").read_text().splitlines()
    for row in [row for row in map(json.loads, seeds) if row["name"] != "bf16"]:
        name = row["name"] if row["name"] == "searched" else f"`{row['name']}`"
        gap = f"{row['gap_percent']:+.3f} ± {row['gap_margin']:.3f} %"
        assert f"| {name} | {row['predicted_gap_percent']:+.3f} % | {gap} | {row['rank']} |" in page
    assert not any(row["searched_is_worse"] for row in uniform) and search["seconds"] < 600
    assert {row["uniform"] for row in uniform} == {
        name for name, text in search["uniform"].items() if text["speed"] >= search["predicted"]["speed"]
    }
