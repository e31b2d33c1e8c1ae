"""The progress of a run on stderr: a moving display on a terminal, elsewhere a line every two seconds."""

import sys
import threading
import time
from contextlib import AbstractContextManager

import click
import rich.progress
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn

from duotone_lab.training.loop import Progress

INTERVAL = 2.0


class Meter:
    """Speed and remaining time of one run. The first step does not count: it compiles."""

    def __init__(self, name: str, steps: int, completed: int, tokens_per_step: int) -> None:
        self.name, self.steps, self.completed, self.tokens_per_step = name, steps, completed, tokens_per_step
        self.loss: float | None = None
        self.status = "starting"
        self.started = time.monotonic()
        self._timed_from: tuple[int, float] | None = None

    def step(self, number: int, loss: float) -> None:
        """Note that a step ended, and its loss."""
        self.completed, self.loss = number, loss
        self._timed_from = self._timed_from or (number, time.monotonic())

    @property
    def _pace(self) -> float | None:
        """Seconds of a step."""
        if self._timed_from is None or self.completed == self._timed_from[0]:
            return None
        return (time.monotonic() - self._timed_from[1]) / (self.completed - self._timed_from[0])

    @property
    def speed(self) -> str:
        """Tokens per second in words; "" before the second step ends."""
        return f"{self.tokens_per_step / pace:,.0f} tokens/s" if (pace := self._pace) else ""

    @property
    def remaining(self) -> str:
        """The time until the last step in words; "" before the second step ends."""
        return f"ETA {clock(pace * (self.steps - self.completed))}" if (pace := self._pace) else ""

    def line(self, whole: str = "") -> str:
        """The run in one line, and `whole`: what it does before the first step ends, how far and fast it is after."""
        if self.loss is None:
            return f"{self.name}: {self.status} ({clock(time.monotonic() - self.started)})"
        parts = (
            f"{self.name}: step {self.completed}/{self.steps}",
            f"loss {self.loss:.4f}",
            self.speed,
            self.remaining,
            whole,
        )
        return ", ".join(filter(None, parts))


class Overall(Meter):
    """All runs as one, and the number of this run."""

    def __init__(self, runs: int = 1, steps: int = 0) -> None:
        super().__init__("all runs", runs * steps, 0, 0)
        self.runs, self.run = runs, 0

    @property
    def part(self) -> str:
        """Which of the runs this is, in words; "" for a single run."""
        return f"run {self.run} of {self.runs}" if self.runs > 1 else ""

    def __str__(self) -> str:
        return f"{self.part}, all {self.remaining}" if self.part and self.remaining else self.part


class PlainProgress(Progress, AbstractContextManager["PlainProgress"]):
    """Lines on stderr: the start and the end of each run, every note, and one line each `interval` seconds."""

    def __init__(self, interval: float = INTERVAL) -> None:
        self.interval = interval
        self._overall = Overall()
        self._meter: Meter | None = None
        self._closing = threading.Event()
        self._beat = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> "PlainProgress":
        self._beat.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        self._beat.join()

    def expect(self, runs: int, steps: int) -> None:
        self._overall = Overall(runs, steps)

    def begin(self, name: str, *, steps: int, completed: int, tokens_per_step: int, model: str) -> None:
        self._meter = Meter(name, steps, completed, tokens_per_step)
        self._overall.run += 1
        start = f", from step {completed}" if completed else ""
        part = f"{self._overall.part}: " if self._overall.part else ""
        self._print(f"{part}{name}: {steps} steps of {tokens_per_step:,} tokens, {model}{start}")

    def note(self, text: str) -> None:
        if self._meter is not None:
            self._meter.status = text
        self._print(f"{self._meter.name}: {text}" if self._meter is not None else text)

    def step(self, number: int, loss: float) -> None:
        if self._meter is not None:
            self._meter.step(number, loss)
            self._overall.step(self._overall.completed + 1, loss)

    def end(self) -> None:
        meter, self._meter = self._meter, None
        if meter is not None:
            self._print(meter.line(str(self._overall)))

    def _repeat(self) -> None:
        while not self._closing.wait(self.interval):
            if (meter := self._meter) is not None:
                self._print(meter.line(str(self._overall)))

    def _print(self, line: str) -> None:
        click.echo(line, err=True)


class LiveProgress(Progress, AbstractContextManager["LiveProgress"]):
    """A display of all runs that redraws itself; notes scroll by above it."""

    def __init__(self, console: Console | None = None) -> None:
        self._display = rich.progress.Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}", markup=False),
            console=console or Console(stderr=True),
        )
        self._meter = Meter("", 0, 0, 0)
        self._overall = Overall()
        self._task = rich.progress.TaskID(0)
        self._whole: rich.progress.TaskID | None = None

    def __enter__(self) -> "LiveProgress":
        self._display.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._display.stop()

    def expect(self, runs: int, steps: int) -> None:
        self._overall = Overall(runs, steps)
        if runs > 1:
            self._whole = self._display.add_task("all runs", total=runs * steps, facts="")

    def begin(self, name: str, *, steps: int, completed: int, tokens_per_step: int, model: str) -> None:
        self._meter = Meter(name, steps, completed, tokens_per_step)
        self._overall.run += 1
        self._task = self._display.add_task(f"{name}, {model}", total=steps, completed=completed, facts="starting")

    def note(self, text: str) -> None:
        if self._meter.name and self._meter.loss is None:
            self._display.update(self._task, facts=text)
        else:
            self._display.console.print(text, markup=False, highlight=False)

    def step(self, number: int, loss: float) -> None:
        self._meter.step(number, loss)
        self._overall.step(self._overall.completed + 1, loss)
        if self._whole is not None:
            self._display.update(self._whole, completed=self._overall.completed, facts=str(self._overall))
        facts = (f"loss {loss:.4f}", self._meter.speed, self._meter.remaining)
        self._display.update(self._task, completed=number, facts="  ".join(filter(None, facts)))

    def end(self) -> None:
        self._display.stop_task(self._task)


def choose() -> PlainProgress | LiveProgress:
    """The display that suits stderr."""
    return LiveProgress() if sys.stderr.isatty() else PlainProgress()


def clock(seconds: float) -> str:
    """m:ss, or h:mm:ss."""
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"
