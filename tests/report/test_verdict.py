"""The sentences of the verdict, which must not claim more than the numbers do."""

from typing import Any

from duotone_lab.report import render, verdict

Result = dict[str, Any]


def test_better_than_the_reference_is_said_as_such(result: Result) -> None:
    result["runs"][2]["gap_percent"] = -0.4
    assert "fp8_current ends 0.40\N{NO-BREAK SPACE}% below the held-out loss of bf16." in verdict.verdict(result)


def test_one_recipe_is_told_in_the_singular(result: Result) -> None:
    del result["runs"][3:]
    assert verdict.verdict(result).endswith("With one seed fp8_current cannot be ranked.")
    result["runs"][2] |= {"rank": 1, "gap_percent": 0.1, "gap_margin": 0.2}
    text = "fp8_current cannot be told from bf16 here: zero lies within its interval."
    assert verdict.verdict(result) == text
    del result["runs"][1:]
    assert verdict.verdict(result) == "bf16 ran alone: name another recipe to compare it with."


def test_without_a_noise_run_nothing_is_called_noise(result: Result) -> None:
    result["settings"]["noise"] = None
    del result["runs"][1]
    assert "noise" not in verdict.verdict(result)
    assert "No noise run has ended" in render(result)


def test_the_noise_counts_without_its_sign(result: Result) -> None:
    result["runs"][1]["gap_percent"] = -0.05
    assert verdict.noise_gap(result) == 0.05
    assert "mxfp8 cannot be told from bf16" in verdict.verdict(result)


def test_no_word_about_emulation_where_nothing_is_emulated(result: Result) -> None:
    for run in result["runs"]:
        for row in run["plan"]:
            row["native"] = True
    assert "emulated GEMMs here" not in render(result) and "Step times are of this machine." in render(result)


def test_a_finished_run_has_no_trouble_even_when_steps_count_from_zero(result: Result) -> None:
    result["partial"] = True
    for run in result["runs"]:
        run["train_loss"] = [[step - 1, loss] for step, loss in run["train_loss"]]
    assert [verdict.trouble(result, run) for run in result["runs"]] == [None] * len(result["runs"])
