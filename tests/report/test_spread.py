"""Histograms of magnitudes, and what one scale of a format holds."""

from typing import Any

import pytest

from duotone_lab.report import render, spread

Result = dict[str, Any]


@pytest.fixture
def observed(result: Result) -> Result:
    counts = [0, 0, 100, 300, 500, 100, 0]
    for run in result["runs"][2:]:
        run["spreads"] = [
            {"role": role, "plane": plane, "lowest": -9, "counts": counts}
            for role in ("input", "grad_output")
            for plane in ("rowwise", "columnwise")
        ]
        run["drift"] = [
            {"step": step, "role": role, "plane": "rowwise", "snr_db": value}
            for step, values in {20: (31.0, 19.5), 40: (30.0, None)}.items()
            for role, value in zip(("input", "grad_output"), values, strict=True)
        ]
    return result


def test_a_histogram_has_the_shares_and_the_ranges_of_all_formats_used(observed: Result) -> None:
    one, other = spread.histograms(observed["runs"])
    assert (one.role, other.role, one.lowest, one.shares) == ("input", "grad_output", -7, [0.1, 0.3, 0.5, 0.1])
    ranges = {reach.formats: (reach.low, reach.high) for reach in one.reaches}
    # E2M1 reaches from 6 down to 0.5, E4M3 from 448 down to 2^-9.
    assert ranges["nvfp4"][1] == -3 and 3 <= ranges["nvfp4"][1] - ranges["nvfp4"][0] <= 5
    assert 17 <= ranges["fp8_e4m3_tensor"][1] - ranges["fp8_e4m3_tensor"][0] <= 19


def test_rounding_rotation_and_histories_do_not_change_what_a_block_holds() -> None:
    assert [reach.formats for reach in spread._reaches({"nvfp4_rht_sr", "nvfp4_sr"}, 0)] == ["nvfp4"]
    assert [reach.formats for reach in spread._reaches({"fp8_e4m3_delayed", "gone"}, 0)] == ["fp8_e4m3_tensor"]


def test_the_page_draws_both(observed: Result) -> None:
    page = render(observed)
    assert "Magnitudes of input by power of two, from 2^-7 to 2^-4" in page and "<title>2^-5: 50 %</title>" in page
    label = page[page.index("Lowest signal-to-noise over sampled steps. At the last one") :]
    assert "nvfp4 30.0 dB" in label[:300] and "nvfp4, step 20: 19.5 dB" in page


def test_without_observed_steps_there_is_no_such_section(result: Result) -> None:
    assert 'id="values"' not in render(result) and spread.histograms(result["runs"]) == []
