"""Records of a case: ratios, rates, errors as rows, JSON lines, and the file that takes them."""

import gc
import json
import subprocess
import sys

import pytest
import torch

from bench.timing import records
from bench.timing.case import Candidate, Case, Work
from bench.timing.duel import Pace
from duotone.errors import UserError

PACE = Pace(turns=3, seconds=0.01)


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch):
    """Each case begins with one, which walks over all objects of the process: half a second late in a run."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


class Clock:
    """Advances with calls."""

    queues = False

    def __init__(self):
        self.ms = 0.0

    def now(self):
        return self.ms / 1e3

    mark = now

    def wait(self, mark):
        pass

    def milliseconds(self, start, end):
        return 1e3 * (end - start)

    def settle(self):
        pass

    def spend(self, milliseconds):
        self.ms += milliseconds


def case_of(candidates, clock, **more):
    return Case("thing", "2x3", "base", clock, lambda: candidates(clock), **more)


def two(clock):
    return [
        Candidate("base", lambda: Work(lambda: clock.spend(8.0))),
        Candidate("fast", lambda: Work(lambda: clock.spend(5.0))),
    ]


def test_the_ratio_is_that_of_medians_and_more_than_one_is_faster():
    base, fast = records.measure(case_of(two, Clock()), PACE)
    assert (base.ms, fast.ms) == (8.0, 5.0) and (base.ratio, fast.ratio) == (1.0, 1.6)
    assert (fast.min, fast.max, fast.calls) == (5.0, 5.0, 2) and fast.error == ""


def test_what_raises_when_made_or_called_is_a_row():
    def candidates(clock):
        def unmade():
            raise UserError("no such layer: take another\nmore")

        def fail():
            raise RuntimeError("no kernel")

        return [Candidate("unmade", unmade), Candidate("uncalled", lambda: Work(fail)), *two(clock)]

    results = {record.candidate: record for record in records.measure(case_of(candidates, Clock()), PACE)}
    assert results["unmade"].error == "UserError: no such layer: take another" and results["unmade"].ms is None
    assert results["uncalled"].error == "RuntimeError: no kernel" and results["uncalled"].ratio is None
    assert results["fast"].ratio == 1.6


def test_without_its_base_a_case_has_no_ratios():
    (fast,) = records.measure(case_of(lambda clock: two(clock)[1:], Clock()), PACE)
    assert fast.ms == 5.0 and fast.ratio is None


def test_rates_are_amounts_per_second_and_ratios_are_of_rates():
    def candidates(clock):
        return [
            Candidate("base", lambda: Work(lambda: clock.spend(2.0), amount=4e6)),
            Candidate("cast", lambda: Work(lambda: clock.spend(4.0), amount=2e6)),
        ]

    base, cast = records.measure(case_of(candidates, Clock(), unit="GB/s", scale=1e-9), PACE)
    assert (base.rate, cast.rate, cast.ratio) == (2.0, 0.5, 0.25) and cast.unit == "GB/s"


def test_a_call_of_several_steps_is_divided_among_them():
    def candidates(clock):
        return [Candidate("base", lambda: Work(lambda: clock.spend(10.0), steps=20))]

    (base,) = records.measure(case_of(candidates, Clock()), PACE)
    assert (base.ms, base.calls) == (0.5, 20)


def test_memory_is_measured_after_the_turns_and_its_failure_keeps_the_times():
    order = []

    def candidates(clock):
        def work(name, peak):
            def peak_mib():
                order.append("peak")
                return peak()

            return Work(lambda: (order.append(name), clock.spend(8.0)), peak_mib=peak_mib)

        return [
            Candidate("base", lambda: work("base", lambda: 12.34)),
            Candidate("big", lambda: work("big", lambda: 1 / 0)),
        ]

    base, big = records.measure(case_of(candidates, Clock()), PACE)
    assert base.peak_mib == 12.3 and big.ms == 8.0 and big.peak_mib is None
    assert big.error == "ZeroDivisionError: division by zero"
    assert order[-2:] == ["peak", "peak"] and "peak" not in order[:-2]


def test_an_interrupt_that_was_wrapped_while_making_a_candidate_stops_the_case():
    def interrupted():
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise RuntimeError("compiling") from error

    with pytest.raises(KeyboardInterrupt):
        records.measure(case_of(lambda _: [Candidate("base", interrupted)], Clock()), PACE)


def test_what_the_listener_raises_ends_the_case():
    def stop(text):
        assert text == "base: making it"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        records.measure(case_of(two, Clock()), PACE, stop)


def test_inputs_that_do_not_fit_are_a_users_error():
    def candidates(clock):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(UserError, match="thing: 2x3 does not fit the device; give a smaller --shape"):
        records.measure(case_of(candidates, Clock()), PACE)


def test_json_lines_hold_every_field_and_null_for_none():
    result = records.measure(case_of(two, Clock()), PACE)
    parsed = [json.loads(line) for line in records.lines(result, "cpu").splitlines()]
    assert [line["candidate"] for line in parsed] == ["base", "fast"]
    fast = parsed[1]
    assert fast["ratio"] == 1.6 and fast["host_us"] is None and fast["peak_mib"] is None
    assert fast["torch"] == torch.__version__ and "threads" in fast["device"] and fast["date"].startswith("20")


def test_lines_are_appended(tmp_path):
    path = tmp_path / "new" / "lines.jsonl"
    records.require_appendable(path)
    records.append(path, "a\n")
    records.require_appendable(path)
    records.append(path, "b\n")
    assert path.read_text() == "a\nb\n"


def test_what_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"cannot write to .*choose a file that you may write"):
        records.require_appendable(tmp_path)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UserError, match="is not a folder"):
        records.require_appendable(file / "lines.jsonl")


def test_measuring_needs_no_display_code():
    code = """
import sys
import bench.subjects.catalog, bench.timing.records
print(sorted({"click", "rich", "duotone_lab.cli"} & set(sys.modules)))
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"
