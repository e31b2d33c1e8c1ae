"""A card for each tensor and direction, events of a run, and speeds of linears."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from duotone_lab.report import cards, choice, render
from duotone_lab.report.page import LIMIT_BYTES

Result = dict[str, Any]
SIDES = [(role, plane) for role in ("input", "weight", "grad_output") for plane in ("rowwise", "columnwise")]


@pytest.fixture
def observed(result: Result, observe: Callable[[Result, list[str]], None]) -> Result:
    for run in result["runs"][2:]:
        observe(run, ["layers.0.up", "layers.1.up"])
    result["runs"][4]["events"] = [{"step": 30, "text": "the schedule switches to <bf16>"}]
    return result


def test_a_card_has_magnitudes_scales_steps_and_words(observed: Result) -> None:
    run = observed["runs"][4]
    all_cards = {card.title: card for card in cards.cards(run)}
    assert list(all_cards) == [f"{role} {plane}" for role, plane in SIDES]
    card = all_cards["input columnwise"]
    assert card.formats == "nvfp4"
    magnitudes, scales = card.histograms
    assert (magnitudes.lowest, magnitudes.shares, scales.lowest, scales.shares) == (
        -8,
        [0.1, 0.3, 0.6],
        -7,
        [0.05, 0.95],
    )
    assert [reach.high for reach in magnitudes.reaches] == [-5] and scales.reaches == []
    amax, limit = card.steps.curves
    assert (amax.points, limit.points) == ([(20.0, 3.0), (40.0, 3.0)], [(20.0, 2.0), (40.0, 4.0)])
    assert [(event.step, event.text) for event in card.steps.events] == [(20, "2.0 % of the elements clip")]
    assert card.notes == [
        "Rowwise and columnwise differ by up to 5.0 % of the tensor, most in layers.1.up.",
        "Outlier channels in 1 of 2 modules, most in layers.1.up: "
        "3 of 64 channels; channel 7 has 40 times the median amax.",
    ]
    assert all_cards["weight rowwise"].notes[1] == "No channel has 8 times the amax of the median channel."


def test_exact_planes_have_no_card_and_older_results_none_at_all(observed: Result, result: Result) -> None:
    run = observed["runs"][4]
    for spread in run["spreads"][:2]:
        del spread["scales"]
    assert [card.title for card in cards.cards(run)] == [f"{role} {plane}" for role, plane in SIDES[2:]]
    assert cards.cards({**run, "spreads": []}) == []


def test_the_page_draws_cards_and_events(observed: Result) -> None:
    page = render(observed)
    assert page.count('<figure class="card">') == 4 * 6
    assert "Scales of grad_output rowwise by power of two, from 2^-7 to 2^-6" in page
    assert "Step 30, nvfp4: the schedule switches to &lt;bf16&gt;." in page
    assert "Step 20: 2.0 % of the elements clip." in page


def test_a_result_of_eighty_layers_keeps_the_page_small(
    build: Callable[..., Result], observe: Callable[[Result, list[str]], None]
) -> None:
    result = build(steps=400, layers=80)
    for run in result["runs"][2:]:
        observe(run, [f"layers.{layer}.up" for layer in range(80)])
    assert len(render(result).encode()) < LIMIT_BYTES < 2_000_000


@pytest.mark.parametrize("odd", [None, math.nan, math.inf, 0.0])
def test_no_number_of_an_observed_run_can_break_the_page(observed: Result, odd: float | None) -> None:
    run = observed["runs"][4]
    for entry in run["drift"]:
        entry.update(amax=odd, limit=odd, clipped=odd)
    for entry in run["operands"]:
        entry.update(disagreement=odd, over_median=odd)
    assert "</html>" in render(observed)


def test_linears_have_the_speed_of_the_measured_table(result: Result) -> None:
    linears = {"layers.0.up": (4096, 14336), "layers.0.tiny": (4, 4)}
    result["settings"] |= {"tokens_per_step": 8192, "linears": linears}
    for run in result["runs"]:
        run["name"] = {"fp8_current": "fp8-current"}.get(run["name"], run["name"])
        run["modules"] = [
            {"module": "layers.0.up", "weights": 8, "caches": 0, "saved": 8},
            {"module": "layers.0.tiny", "weights": 8, "caches": 0, "saved": 8},
        ]
    outcome = choice.module_speeds(result)
    assert set(outcome) == {"layers.*.up", "layers.*.tiny"} and set(outcome["layers.*.tiny"]) == {""}
    assert outcome["layers.*.up"][2].endswith(" times") and float(outcome["layers.*.up"][2].split()[0]) > 1.3
    assert outcome["layers.*.up"][2] in render(result)
