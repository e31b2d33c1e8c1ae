"""The duel: candidates take turns on a device that never idles, so that all meet the same clock rate and heat."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

WARM_UP = 3
"""The first calls of a candidate compile and fill caches; they do not count."""

SAMPLES = 3
FEW_CALLS, FEW_MS = 5, 50.0
"""A sample for the number of calls in a turn and for the host time: few, so that no queue fills up."""

MOST_CALLS = 2000
MESSAGE = 160


@dataclass(frozen=True)
class Pace:
    """How many turns each candidate has, and about how many seconds one takes."""

    turns: int = 6
    seconds: float = 0.3

    def calls(self, milliseconds: float) -> int:
        """How many calls of this length make a turn."""
        return min(MOST_CALLS, max(1, round(1e3 * self.seconds / max(milliseconds, 1e-6))))


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a call, one entry a turn. `host_us` is the host time of a call, None without a queue."""

    turns: tuple[float, ...]
    calls: int
    host_us: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.turns)


class Clock(Protocol):
    """Marks in the stream of calls. `queues` says whether a call may return before it is done."""

    queues: bool

    def now(self) -> float:
        """Seconds on the host."""
        ...

    def mark(self) -> Any:
        """A point between two calls."""
        ...

    def wait(self, mark: Any) -> None:
        """Wait until the device has reached the mark."""
        ...

    def milliseconds(self, start: Any, end: Any) -> float:
        """From one mark to the other; waits for the second."""
        ...

    def settle(self) -> None:
        """Wait until nothing is left to do."""
        ...


class HostClock:
    """time.perf_counter, for calls that are done when they return."""

    queues = False

    def now(self) -> float:
        return time.perf_counter()

    def mark(self) -> float:
        return time.perf_counter()

    def wait(self, mark: float) -> None:
        pass

    def milliseconds(self, start: float, end: float) -> float:
        return 1e3 * (end - start)

    def settle(self) -> None:
        pass


class CudaClock:
    """Events of the current CUDA device."""

    queues = True

    def now(self) -> float:
        return time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def milliseconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end)

    def settle(self) -> None:
        torch.cuda.synchronize()


def clock_for(device: str) -> Clock:
    """Events on CUDA, the host's clock elsewhere."""
    return CudaClock() if device == "cuda" else HostClock()


@dataclass
class _Turns:
    """The turns of one candidate: how many calls each has, and the marks around them."""

    call: Callable[[], object]
    calls: int
    host_us: float | None
    marks: list[tuple[Any, Any]]

    def take(self, clock: Clock) -> None:
        """Enqueue a turn and wait for the beginning of its last call.

        The device still has that call to do while the next candidate begins, and the host is no further ahead.
        """
        start = near = clock.mark()
        for _ in range(self.calls - 1):
            self.call()
        if self.calls > 1:
            near = clock.mark()
        self.call()
        self.marks.append((start, clock.mark()))
        clock.wait(near)

    def timing(self, clock: Clock) -> Timing:
        milliseconds = tuple(clock.milliseconds(*marks) / self.calls for marks in self.marks)
        return Timing(milliseconds, self.calls, self.host_us)


def duel(
    calls: Mapping[str, Callable[[], object]],
    clock: Clock,
    pace: Pace | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Timing | str]:
    """The timing of each candidate by name, or the error that it raised, in one line.

    Nothing is read from the device before the last turn. `tell` hears what comes next; what it raises ends the duel.
    """
    pace = pace or Pace()
    failed: dict[str, str] = {}
    running: dict[str, _Turns] = {}
    for name, call in calls.items():
        tell(f"{name}: first calls")
        try:
            running[name] = _warm(call, clock, pace)
        except Exception as error:
            failed[name] = failure(error)
    for turn in range(pace.turns):
        for name, turns in list(running.items()):
            tell(f"{name}: turn {turn + 1} of {pace.turns}")
            try:
                turns.take(clock)
            except Exception as error:
                failed[name] = failure(error)
                del running[name]
    return {name: failed[name] if name in failed else _read(running[name], clock) for name in calls}


def alone(call: Callable[[], object], clock: Clock, pace: Pace) -> float:
    """Milliseconds of a call on a device that does nothing else: the median turn. Raises what the call raises."""
    turns = _warm(call, clock, pace)
    for _ in range(pace.turns):
        turns.take(clock)
    return turns.timing(clock).median


def failure(error: Exception) -> str:
    """`one_line`; KeyboardInterrupt where that lies behind the error, as compilers wrap what stops them."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        behind = behind.__cause__ or behind.__context__
    return one_line(error)


def _warm(call: Callable[[], object], clock: Clock, pace: Pace) -> _Turns:
    for _ in range(WARM_UP):
        call()
    clock.settle()
    once, _ = _sample(call, 1, clock)
    few = min(FEW_CALLS, max(1, int(FEW_MS / max(once, 1e-6))))
    samples = [_sample(call, few, clock) for _ in range(SAMPLES)]
    milliseconds, host = (statistics.median(values) for values in zip(*samples, strict=True))
    return _Turns(call, pace.calls(milliseconds), 1e6 * host if clock.queues else None, [])


def _sample(call: Callable[[], object], few: int, clock: Clock) -> tuple[float, float]:
    """Milliseconds and seconds of the host for a call, of `few` calls on an idle device."""
    begun, start = clock.now(), clock.mark()
    for _ in range(few):
        call()
    host, end = clock.now() - begun, clock.mark()
    clock.settle()
    return clock.milliseconds(start, end) / few, host / few


def _read(turns: _Turns, clock: Clock) -> Timing | str:
    try:
        return turns.timing(clock)
    except Exception as error:
        return failure(error)


def one_line(error: Exception) -> str:
    """The kind of an exception and the beginning of its message."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
    return text if len(text) <= MESSAGE else f"{text[: MESSAGE - 3]}..."
