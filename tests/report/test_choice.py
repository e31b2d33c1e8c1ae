"""The first line: what to use on which GPU, and how sure that is."""

from typing import Any

from duotone.report import choice, render

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
    assert text.startswith("Use fp8-current on an NVIDIA H200: a linear of 4096 x 14336 with 8192 tokens is 1.6")
    assert text.endswith("times as fast, and its loss cannot be told from that of bf16.")
    told = choice.confidence(result)
    assert told.startswith("Confidence: moderate, its gap may be up to 0.30\N{NO-BREAK SPACE}%")
    assert "bench/results/2026-11-21-h200" in told and "outside of the measured shapes" in told
    assert "Unknown for mxfp8-fwd-nvfp4-bwd." in told


def test_a_fast_recipe_that_costs_loss_is_not_proposed(result: Result) -> None:
    text = choice.answer(ranked(result, fp8_current=(0.5, 0.1)))
    assert text.startswith("Stay with bf16 on an NVIDIA H200") and "0.50 ± 0.10\N{NO-BREAK SPACE}% above" in text


def test_one_seed_is_never_more_than_a_try(result: Result) -> None:
    result["runs"][2] |= {"name": "fp8-current", "gap_percent": -0.3}
    assert choice.answer(result).startswith("Try fp8-current") and "one seed cannot rank" in choice.confidence(result)


def test_on_a_gpu_the_steps_of_this_run_decide(result: Result) -> None:
    ranked(result)["machine"] |= {"device": "cuda", "processor": "NVIDIA B200"}
    mxfp8 = next(run for run in result["runs"] if run["name"] == "mxfp8")
    mxfp8["step_ms"] = result["runs"][0]["step_ms"] / 2
    assert "Use mxfp8 on an NVIDIA B200: a step of this model is 2.00 times as fast" in choice.answer(result)
    assert "measured in this run" in choice.confidence(result)


def test_linears_within_the_measured_shapes_are_interpolated_and_marked(result: Result) -> None:
    ranked(result)["settings"] |= {"tokens_per_step": 8192, "linears": [[4096, 8192, 14]]}
    assert "the work of the linears of this model is" in choice.answer(result) and "(interpolated)" in choice.answer(
        result
    )
    assert 'hollow"><title>fp8-current' in render(result)


def test_without_a_recipe_to_compare_the_page_has_its_plain_heading(result: Result) -> None:
    result["runs"] = result["runs"][:1]
    assert choice.answer(result) == "" and "<h1>0 recipes against bf16 over 120 steps</h1>" in render(result)
