"""The duel on a clock that tests turn: order of turns, medians, numbers of calls, and candidates that raise."""

import pytest

from bench.timing.duel import FEW_CALLS, SAMPLES, WARM_UP, HostClock, Pace, duel, one_line

FIRST = WARM_UP + 1 + SAMPLES  # calls of a candidate before its first turn where a sample is one call


class FakeClock:
    """Time stands still but for `spend`, which work done by calls adds to."""

    queues = False

    def __init__(self):
        self.ms = 0.0
        self.log = []

    def now(self):
        return self.ms / 1e3

    def mark(self):
        self.log.append("mark")
        return self.ms

    def wait(self, mark):
        self.log.append(("wait", mark))

    def milliseconds(self, start, end):
        return end - start

    def settle(self):
        self.log.append("settle")

    def worker(self, name, milliseconds):
        """A call that takes these milliseconds, one after the other, the last for good."""
        left = list(milliseconds)

        def call():
            self.log.append(name)
            self.ms += left.pop(0) if len(left) > 1 else left[0]

        return call


@pytest.fixture
def clock():
    return FakeClock()


def test_the_timing_has_the_median_and_all_turns(clock):
    call = clock.worker("a", [900.0, *[100.0] * (FIRST - 1), 100.0, 130.0, 110.0])
    result = duel({"a": call}, clock, Pace(turns=3, seconds=0.1))["a"]
    assert result.turns == pytest.approx((100.0, 130.0, 110.0)) and result.calls == 1
    assert result.median == pytest.approx(110.0) and result.host_us is None


def test_candidates_take_turns_and_nothing_settles_between_them(clock):
    calls = {"a": clock.worker("a", [100.0]), "b": clock.worker("b", [50.0])}
    result = duel(calls, clock, Pace(turns=2, seconds=0.1))
    assert (result["a"].calls, result["b"].calls) == (1, 2)
    turns = clock.log[len(clock.log) - clock.log[::-1].index("settle") :]
    assert [entry for entry in turns if entry in ("a", "b")] == ["a", "b", "b", "a", "b", "b"]


def test_the_host_waits_for_the_beginning_of_the_last_call_of_a_turn_only(clock):
    duel({"a": clock.worker("a", [50.0])}, clock, Pace(turns=1, seconds=0.15))
    start = clock.ms - 150.0
    assert clock.log[-7:] == ["mark", "a", "a", "mark", "a", "mark", ("wait", start + 100.0)]


def test_short_calls_fill_a_turn_and_long_ones_are_called_once(clock):
    calls = {"short": clock.worker("short", [0.5]), "long": clock.worker("long", [5000.0])}
    result = duel(calls, clock, Pace(turns=1, seconds=0.3))
    assert (result["short"].calls, result["long"].calls) == (600, 1)
    assert result["short"].median == pytest.approx(0.5)


def test_the_host_time_is_that_of_a_few_calls_on_an_idle_device():
    clock = FakeClock()
    clock.queues = True
    device = {"a": 0.0}
    clock.mark = lambda: device["a"]

    def call():
        clock.ms += 0.2
        device["a"] += 3.0

    result = duel({"a": call}, clock, Pace(turns=2, seconds=0.03))["a"]
    assert result.host_us == pytest.approx(200.0) and result.median == pytest.approx(3.0) and result.calls == 10


def test_samples_of_short_calls_are_of_a_few(clock):
    duel({"a": clock.worker("a", [1.0])}, clock, Pace(turns=1, seconds=0.001))
    assert clock.log.count("a") == WARM_UP + 1 + SAMPLES * FEW_CALLS + 1


def test_a_candidate_that_raises_at_first_or_later_is_its_error_and_the_others_go_on(clock):
    def broken():
        raise RuntimeError("no kernel\nfor this shape")

    seen = []

    def late():
        seen.append(1)
        clock.ms += 100.0
        if len(seen) > FIRST + 1:
            raise ValueError("second turn")

    calls = {"broken": broken, "late": late, "good": clock.worker("good", [100.0])}
    result = duel(calls, clock, Pace(turns=3, seconds=0.1))
    assert list(result) == ["broken", "late", "good"]
    assert result["broken"] == "RuntimeError: no kernel" and result["late"] == "ValueError: second turn"
    assert len(result["good"].turns) == 3


def test_what_comes_next_is_told(clock):
    messages = []
    duel({"a": clock.worker("a", [100.0])}, clock, Pace(turns=2, seconds=0.1), messages.append)
    assert messages == ["a: first calls", "a: turn 1 of 2", "a: turn 2 of 2"]


def test_an_interrupt_is_not_a_candidates_error(clock):
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        duel({"a": interrupted}, clock)


def test_the_hosts_clock_measures_milliseconds(monkeypatch):
    seconds = [10.0]
    monkeypatch.setattr("time.perf_counter", lambda: seconds[0])

    def call():
        seconds[0] += 0.002

    assert duel({"a": call}, HostClock(), Pace(turns=2, seconds=0.004))["a"].median == pytest.approx(2.0)


def test_errors_are_one_short_line():
    assert one_line(RuntimeError()) == "RuntimeError"
    assert one_line(RuntimeError("\n a \n b")) == "RuntimeError: a"
    assert len(one_line(RuntimeError("x" * 500))) == 160


def test_an_interrupt_that_a_compiler_wrapped_still_stops_the_duel() -> None:
    def stopped() -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise RuntimeError("making fake tensor call") from error

    with pytest.raises(KeyboardInterrupt):
        duel({"a": stopped}, HostClock(), Pace(1, 0.01))
