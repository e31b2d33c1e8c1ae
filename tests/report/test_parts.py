"""The small functions below the charts, by value."""

import math

import pytest

from duotone_lab.report import metrics, module_names, numbers, plan_table, planes, series
from duotone_lab.report.axis import Axis, round_out, round_step
from duotone_lab.report.series import styles


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0, 120, ["0", "50", "100"]),
        (2.0, 6.0, ["2", "3", "4", "5", "6"]),
        (-0.5, 1.5, ["−0.5", "0", "0.5", "1.0", "1.5"]),  # noqa: RUF001
        (0, 0.015, ["0", "0.005", "0.010", "0.015"]),
        (0, 3e7, ["0", "1e+07", "2e+07", "3e+07"]),
    ],
)
def test_ticks_are_round_and_equally_long(low: float, high: float, texts: list[str]) -> None:
    assert [text for _, text in Axis.over(low, high, (0, 100), ticks=4).ticks()] == texts


def test_an_axis_places_its_ends_and_holds_what_is_beyond() -> None:
    axis = Axis.over(10, 20, (300, 100))
    assert [axis.position(value) for value in (10, 15, 20, 99, -99)] == [300, 200, 100, 100, 300]


def test_an_axis_of_a_single_value_has_a_tick_there() -> None:
    assert (1, "1") in Axis.over(1, 1, (0, 100), whole=True).ticks()


def test_steps_are_one_two_or_five_times_a_power_of_ten() -> None:
    assert [round_step(raw) for raw in (0.9, 1.1, 3.0, 7.0, 0.021)] == pytest.approx([1, 2, 5, 10, 0.05])
    assert round_out(14.9, 34.6) == (10, 35)


def test_smoothing_keeps_the_first_value_and_averages_the_last() -> None:
    points = [(float(step), float(value)) for step, value in enumerate((8, 4, 3, 2, 4))]
    assert [value for _, value in series.smooth(points, 3)] == pytest.approx([8, 5, 3, 3, 3])
    assert series.window_of(120) == 5
    assert series.window_of(10) == 1


def test_curves_are_cut_where_they_are_not_numbers() -> None:
    curve = [[1, 2.0], [2, math.nan], [3, 4.0], [4, 5.0], [5, None]]
    assert series.pieces(curve) == [[(1, 2.0)], [(3, 4.0), (4, 5.0)]]
    assert series.first_broken(curve) == 2
    assert series.first_broken([[1, None]]) is None


def test_thinning_keeps_both_ends() -> None:
    points = [(float(step), 0.0) for step in range(1001)]
    thinned = series.thin(points, 100)
    assert len(thinned) <= 101
    assert (thinned[0][0], thinned[-1][0]) == (0, 1000)


def test_gaps_are_percent_of_the_reference_at_the_same_step() -> None:
    assert series.gaps([[1, 3.0], [2, 1.0], [9, 1.0]], [[2, 2.0], [1, 2.0]]) == [(1, 50.0), (2, -50.0)]


def test_gaps_of_several_seeds_are_averaged_where_all_have_a_value() -> None:
    pairs = [
        ([[1, 3.0], [2, 1.0], [3, 1.0]], [[1, 2.0], [2, 2.0], [3, 2.0]]),
        ([[1, 4.0], [2, None]], [[1, 2.0], [2, 2.0]]),
    ]
    assert series.mean_gaps(pairs) == [(1, 75.0), (2, None)]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["layers.0.mlp", "layers.1.mlp", "layers.3.mlp"], ["layers.{0–1, 3}.mlp"]),  # noqa: RUF001
        (["head"], ["head"]),
        (["layers.4.mlp"], ["layers.4.mlp"]),
        (["a.0.b.1", "a.0.b.2"], ["a.0.b.{1–2}"]),  # noqa: RUF001
        ([f"a.{i}.b.{j}" for i in range(2) for j in range(2)], ["a.*.b.* (4 modules)"]),
        (["fc1", "fc2"], ["fc1", "fc2"]),
    ],
)
def test_module_names_are_told_short_and_never_wrongly(names: list[str], expected: list[str]) -> None:
    assert module_names.compact(names) == expected


def test_a_gemm_is_high_precision_only_when_both_operands_are() -> None:
    rows = [
        {"a": "identity", "b": "identity", "native": True},
        {"a": "identity", "b": "nvfp4", "native": False},
        {"a": "mxfp8_e4m3", "b": "mxfp8_e4m3", "native": True},
        {"a": None, "b": None, "native": None},
    ]
    assert plan_table.counts(rows) == {"native": 1, "emulated": 1, "high precision": 2}


def test_modules_with_one_different_reason_are_not_gathered() -> None:
    row = {"gemm": "fprop", "a": "nvfp4", "b": "nvfp4", "kernel": "k", "native": False, "reason": "same"}
    rows = [{**row, "module": f"layers.{index}"} for index in range(3)]
    rows[1]["reason"] = "other"
    assert [group.modules for group in plan_table.groups(rows)] == [["layers.{0, 2}"], ["layers.1"]]
    assert [group.rows[0][0]["reason"] for group in plan_table.groups(rows)] == ["same", "other"]


def test_memory_is_summed_by_kind_of_module() -> None:
    def run(saved: int) -> dict[str, list[dict[str, int | str]]]:
        rows = [{"module": f"layers.{index}.mlp", "weights": 10, "caches": 0, "saved": saved} for index in range(3)]
        return {"modules": [*rows, {"module": "", "weights": 0, "caches": 0, "saved": 0}]}

    assert module_names.memory([run(5), {}, run(7)]) == [("layers.*.mlp", [30, 15, None, 21])]
    assert module_names.memory([{}]) == []


def test_the_largest_error_of_a_kind_is_told_with_its_ratio() -> None:
    errors = {"layers.0.mlp": (0.02, 0.04), "layers.1.mlp": (0.05, 0.04)}
    entries = [{"module": name, "gemm": "dgrad", "error": e, "expected": x} for name, (e, x) in errors.items()]
    assert planes.products({"products": entries}) == [("layers.*.mlp", [("", ""), ("5.00", "1.2"), ("", "")])]
    assert planes.products({}) == []


def test_what_ran_is_told_beside_what_was_asked() -> None:
    row = {"gemm": "dgrad", "a": "nvfp4", "b": "nvfp4", "kernel": "k", "native": False, "reason": ""}
    plan = [{**row, "module": name} for name in ("same", "other", "unseen")]
    planes_of = {"same": ("nvfp4", "nvfp4"), "other": ("nvfp4", "mxfp8_e4m3")}
    statistics = [
        {"module": name, "role": role, "plane": plane, "format": fmt, "samples": 3}
        for name, pair in planes_of.items()
        for (role, plane), fmt in zip((("grad_output", "rowwise"), ("weight", "columnwise")), pair, strict=True)
    ]
    assert [one["ran"] for one in plan_table.observed(plan, statistics)] == [
        "as asked, 3 times",
        "NOT as asked: nvfp4 x mxfp8_e4m3",
        "not observed",
    ]


def test_a_row_of_several_layers_has_the_worst_of_each_quantity() -> None:
    row = {"role": "input", "plane": "rowwise", "format": "nvfp4", "amax": 1.0, "samples": 3}
    signals, lost = (20.0, 5.0, None), (0.1, 0.0, math.nan)
    entries = [
        {**row, "module": f"layers.{index}.mlp", "snr_db": signal, "underflow": share, "saturation": 0.0}
        for index, (signal, share) in enumerate(zip(signals, lost, strict=True))
    ]
    (whole,) = planes.rows(entries, (0.0, 20.0), members=1, hover=False)
    assert whole.name == "layers.*.mlp (3)"
    assert [cell.text for cell in whole.cells[0][0]] == ["5.0", "NaN", "0", *["–"] * 4]  # noqa: RUF001
    assert [member.cells[0][0] for member in whole.members] == [
        [metrics.Cell("20.0", "v9")],
        [metrics.Cell("5.0", "v2")],
        [metrics.Cell("exact")],
    ]
    exact = [{**entry, "snr_db": None} for entry in entries]
    assert planes.rows(exact, (0.0, 20.0), members=0, hover=False)[0].cells[0][0][0].text == "exact"


def test_events_of_delayed_histories_are_told_with_the_module_that_has_most() -> None:
    row = {"role": "grad_output", "plane": "rowwise", "format": "fp8_e5m2_delayed"}
    entries = [{**row, "module": name, "amaxes_skipped": n} for name, n in (("a", 1), ("b", 3))]
    text = planes.events([*entries, {**row, "module": "c"}, {**row, "module": "d", "spikes_clamped": 2}])
    assert text.startswith(
        "delayed scaling: 4 amaxes were not finite, 2 were spikes and entered as less; most of them in b "
    )
    assert planes.events([{**row, "module": "c"}, {**row, "module": "d", "spikes_clamped": 0}]) == ""


def test_numbers_are_rounded_with_their_unit() -> None:
    assert numbers.percent(0.2149, sign=True) == "+0.21\N{NO-BREAK SPACE}%"
    assert numbers.percent(-0.0041, sign=True) == "\N{MINUS SIGN}0.004\N{NO-BREAK SPACE}%"
    assert [numbers.share(value) for value in (0.0, 1e-6, 0.00012, 0.0599, 0.5)] == [
        *("0", "<0.001", "0.012", "6.0", "50.0"),
    ]
    assert numbers.size(0) == "0\N{NO-BREAK SPACE}B"
    assert numbers.significant(22345.6) == "22,346"
    assert numbers.listing(["a", "b", "c"]) == "a, b and c"


def test_many_runs_get_styles_that_differ() -> None:
    assert len({*styles([{"is_reference": False, "is_noise": False}] * 18)}) == 18


def test_long_names_lose_their_middle() -> None:
    assert numbers.shorten("abcdefghij", 5) == "ab…ij"
