"""The first line: what to use on which GPU, and how sure that is."""

from typing import Any

import pytest

from duotone.observe import speeds
from duotone_lab.report import choice, render
from duotone_lab.report.scatter import Dot, Scatter
from duotone_lab.report.series import Style

Result = dict[str, Any]
NAMES = {"fp8_current": "fp8-current", "hybrid": "mxfp8-fwd-nvfp4-bwd"}


def ranked(result: Result, **gaps: tuple[float, float]) -> Result:
    """The result over three seeds, with the gap and margin of some recipes, under names that the table knows."""
    del result["runs"][1]
    for run in result["runs"]:
        run["name"] = NAMES.get(run["name"], run["name"])
        gap, margin = gaps.get(run["name"].replace("-", "_"), (0.1, 0.2))
        run |= {"gap_percent": 0.0 if run["is_reference"] else gap, "gap_margin": margin, "rank": 1}
    return result


def test_the_fastest_recipe_that_cannot_be_told_from_bf16_is_named_with_its_speed(result: Result) -> None:
    text = choice.answer(ranked(result))
    assert text.startswith(
        "Use fp8-current on an NVIDIA H200: 1.60 times as fast for linears 4096 wide with 8192 tokens"
    )
    assert text.endswith("tokens, and its loss cannot be told from that of bf16.")
    message = choice.confidence(result)
    assert message.startswith("Confidence: moderate, its gap may be up to 0.30\N{NO-BREAK SPACE}%")
    assert "bench/results/2026-11-21-h200" in message and "the linears of this model were not measured" in message
    assert "Unknown for mxfp8-fwd-nvfp4-bwd." in message


def test_results_that_differ_in_more_than_seeds_name_no_recipe(result: Result) -> None:
    ranked(result)["settings"]["differences"] = {"seeds": [3, 5]}
    assert choice.answer(result).startswith("Use fp8-current") and "moderate" in choice.confidence(result)
    result["settings"]["differences"]["tokens_per_step"] = [512, 1024]
    assert choice.answer(result).startswith(
        "No recipe is named: the two results differ in tokens per step (512 and 1024)"
    )
    assert choice.confidence(result).startswith("Confidence: none")


def test_a_fast_recipe_that_costs_loss_is_not_proposed(result: Result) -> None:
    text = choice.answer(ranked(result, fp8_current=(0.5, 0.1)))
    assert text.startswith("Stay with bf16 on an NVIDIA H200") and "0.50 ± 0.10\N{NO-BREAK SPACE}% above" in text


def test_one_seed_is_never_more_than_a_try(result: Result) -> None:
    result["runs"][2] |= {"name": "fp8-current", "gap_percent": -0.3}
    assert choice.answer(result).startswith("Try fp8-current") and "one seed cannot rank" in choice.confidence(result)


def test_a_small_gap_under_one_seed_is_no_reason_to_stay(result: Result) -> None:
    """A large one is, and the line then tells how fast the recipe is."""
    result["runs"][2]["name"] = "fp8-current"
    for gap, message in (
        (0.9, "above that of bf16, which one seed cannot tell from none."),
        (1.1, "as fast, but ends 1.10"),
    ):
        result["runs"][2]["gap_percent"] = gap
        text = choice.answer(result)
        assert (
            message in text
            and text.startswith("Try fp8-current" if gap < 1 else "Stay with bf16")
            and "1.60 times" in text
        )


def test_on_a_gpu_the_steps_of_this_run_decide(result: Result) -> None:
    ranked(result)["machine"] |= {"device": "cuda", "processor": "NVIDIA B200"}
    mxfp8 = next(run for run in result["runs"] if run["name"] == "mxfp8")
    mxfp8["step_ms"] = result["runs"][0]["step_ms"] / 2
    assert "Use mxfp8 on an NVIDIA B200: 2.00 times as fast for a step of this model" in choice.answer(result)
    assert "measured in this run" in choice.confidence(result)


def test_linears_within_the_measured_shapes_are_interpolated_and_marked(result: Result) -> None:
    ranked(result)["settings"] |= {
        "tokens_per_step": 8192,
        "linears": {str(layer): (4096, 8192) for layer in range(14)},
    }
    assert "for the linears of this model, and" in choice.answer(result) and "(interpolated)" in choice.answer(result)
    assert 'hollow"><title>fp8-current' in render(result)


def test_a_size_that_was_named_takes_the_place_of_that_of_the_model(result: Result) -> None:
    ranked(result)["settings"] |= {"tokens_per_step": 128, "linears": {"up": (64, 64)}, "size": [8192, 16384]}
    fast = speeds.measured().speed("fp8-current", (16384, 8192, 8192)).ratio
    assert f"{fast:.2f} times as fast for linears 8192 wide with 16384 tokens, and" in choice.answer(result)
    result["settings"]["size"] = [64, 128]
    assert choice.answer(result).endswith("No speed is known there for linears 64 wide with 128 tokens.")


SEARCH = {"recipe": "searched", "kind": "speed", "value": 1.2, "gap_percent": 0.0, "speed": 1.25, "memory": 0.95}


@pytest.mark.parametrize(
    ("gap", "margin", "goal", "words"),
    [
        (
            0.1,
            0.2,
            {},
            "so speed=1.2 is met; its loss ends 0.10 ± 0.20 % above that of bf16 (zero lies in this interval).",
        ),
        (-0.3, 0.2, {}, "so speed=1.2 is met; its loss ends 0.30 ± 0.20 % below that of bf16."),
        (0.1, 0.2, {"kind": "memory", "value": 1.0}, "it keeps 0.95 of the bytes for backward, so memory=1 is met"),
        (0.1, 0.2, {"kind": "gap", "value": 0.2}, "whether gap=0.2 % is met cannot be told"),
        (0.1, None, {"kind": "gap", "value": 0.2}, "whether gap=0.2 % is met cannot be told"),
        (0.5, 0.2, {"kind": "gap", "value": 0.2}, "and gap=0.2 % is not met"),
        (-0.1, 0.2, {"kind": "gap", "value": 0.2}, "and gap=0.2 % is met"),
        (None, None, {}, "so speed=1.2 is met; its loss is not measured."),
    ],
)
def test_the_first_line_of_a_search_has_speed_gap_and_whether_the_goal_is_met(
    result: Result, gap: float | None, margin: float | None, goal: Result, words: str
) -> None:
    """The recipe mixes GEMMs of two measured recipes; a third of the time of the one and two of the other."""
    ranked(result)["settings"] |= {"linears": {"up": (64, 64)}, "size": [4096, 8192], "search": SEARCH | goal}
    run = result["runs"][1] | {"name": "searched", "gap_percent": gap, "gap_margin": margin}
    run["rank"] = 1 if margin is not None else None
    fp8, exact = ("fp8_e4m3_tensor", "fp8_e4m3_tensor"), ("identity", "identity")
    run["plan"] = [
        {**run["plan"][0], "module": "up", "gemm": gemm, "a": formats[0], "b": formats[1]}
        for gemm, formats in {"fprop": fp8, "dgrad": exact, "wgrad": exact}.items()
    ]
    result["runs"] = [result["runs"][0], run]
    ratio = 3 / (2 + 1 / speeds.measured().speed("fp8-current", (8192, 4096, 4096)).ratio)
    text, page = choice.answer(result), render(result)
    assert text.startswith("Try" if margin is None else "Use") and words in text.replace("\N{NO-BREAK SPACE}", " ")
    assert f"predicted {ratio:.2f} times as fast as bf16 for linears 4096 wide with 8192 tokens, " in text
    assert f"<h1>{text}</h1>" in page
    assert gap is None or f"speed {ratio:.2f} times, predicted</title>" in page


def test_a_run_without_a_reference_shows_its_loss(result: Result) -> None:
    """As of `duotone train`: no link to a chart that is not there, and no dash in the place of a gap."""
    result["runs"] = [result["runs"][4] | {"gap_percent": None, "final_heldout_loss": 2.5}]
    page = render(result)
    assert "<h1>nvfp4 over 120 steps</h1>" in page and 'href="#trade"' not in page
    assert '<span class="gap">2.500</span>' in page and "no gap to a" not in page


def test_a_name_stands_where_it_covers_no_other_mark() -> None:
    """Names go to the right of marks at the left, but not over the next mark at the same height."""
    style = Style("s0", "circle", None)
    places = {"a name": (0.0, 1.4), "b": (0.0, 1.5), "c": (1.0, 1.0), "d": (-1.0, 2.0)}
    dots = [Dot(name, style, gap, 0.0, across, "") for name, (gap, across) in places.items()]
    sides = [
        {dot.name: side for dot, _, side in Scatter("", "", part).labels()} for part in (dots, [dots[0], *dots[2:]])
    ]
    assert sides == [{"a name": -1, "b": 1, "c": 1, "d": -1}, {"a name": 1, "c": 1, "d": -1}]


def test_intervals_are_cut_only_beside_shorter_ones() -> None:
    """A chart of one recipe has its whole interval; one of many is not pressed flat by the longest."""
    style = Style("s0", "circle", None)
    dots = [Dot(f"r{margin}", style, 0.1, margin, 1.0, "") for margin in (0.0, 0.98, 0.9, 40.0)]
    whole, several = Scatter("", "", dots[:2]).y, Scatter("", "", dots).y
    assert whole.low <= -0.88 and whole.high >= 1.08 and 1.08 <= several.high < 5


def test_without_a_recipe_to_compare_the_page_has_its_plain_heading(result: Result) -> None:
    result["runs"] = result["runs"][:1]
    assert choice.answer(result) == "" and "<h1>bf16 alone over 120 steps</h1>" in render(result)
