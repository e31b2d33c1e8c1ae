"""What a measurement does now, on stderr: a line that moves on a terminal, one every two seconds elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from duotone_lab.cli.run_display import Meter, PlainProgress


class StatusLines(PlainProgress):
    """What was told last, each `interval` seconds."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self._status = self._meter = Meter(title, 0, 0, 0)

    def __enter__(self) -> "StatusLines":
        super().__enter__()
        return self

    def __call__(self, text: str) -> None:
        self._status.status = text


@contextmanager
def status_line(title: str) -> Iterator[Callable[[str], None]]:
    """A spinner with what was told last; it goes away at the end."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    console = Console(stderr=True)
    options = {"console": console, "transient": True, "redirect_stdout": False, "refresh_per_second": 2}
    with Progress(*columns, **options) as shown:  # redrawn seldom, because it takes time from what is measured
        task = shown.add_task(title)
        yield lambda text: shown.update(task, description=f"{title}: {text}")


@contextmanager
def display(title: str) -> Iterator[Callable[[str], None]]:
    """Give what takes the text, in the form that suits stderr."""
    with status_line(title) if sys.stderr.isatty() else StatusLines(title) as tell:
        yield tell
