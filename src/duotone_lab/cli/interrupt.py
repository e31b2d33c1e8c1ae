"""Ctrl-C, SIGTERM and SIGHUP ask a run to stop after the current unit of work. A second Ctrl-C stops at once."""

import contextlib
import os
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import click

STDOUT, STDERR = 1, 2
"""A handler may run inside a write to a stream, so it goes past it."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Handler = Callable[[int, FrameType | None], object] | int | None
EXIT_CODE = 128 + signal.SIGINT


class Interrupt:
    """While active, the first of the signals only sets `requested`; a SIGINT after it raises KeyboardInterrupt.

    `unit` is what a run finishes before it stops. `exit_code` is 128 and the number of the first signal. A signal that
    was ignored before stays so, as `nohup` has SIGHUP, except SIGINT.
    """

    def __init__(self, unit: str = "step") -> None:
        self.requested, self.unit, self.exit_code = False, unit, EXIT_CODE
        self._before: dict[int, Handler] = {}
        self._terminals: list[int] = []

    def __enter__(self) -> "Interrupt":
        self._terminals = [stream for stream in (STDOUT, STDERR) if os.isatty(stream)]
        for number in SIGNALS:
            if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def __call__(self) -> bool:
        return self.requested

    def exit_of(self, context: click.Context, folder: Path, *, stopped: bool, failed: bool) -> int:
        """The exit code of a command. If it was stopped, print what continues it."""
        if not stopped:
            return int(failed)
        if context.params.get("parallel") is None:
            click.echo(f"Continue with: {context.command_path} --resume --out {shlex.quote(str(folder))}", err=True)
        return self.exit_code

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._leave_terminal()
        if self.requested:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return  # a shell and the kernel may both tell of one hang-up
        self.requested, self.exit_code = True, 128 + number
        with contextlib.suppress(OSError):  # nobody may be there to read it, and the run has to be saved
            os.write(STDERR, f"stopping after this {self.unit}; Ctrl-C again stops at once\n".encode())

    def _leave_terminal(self) -> None:
        """Drop output to a terminal that hung up: an error would end the run before it is saved."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in self._terminals:
            os.dup2(nowhere, stream)
        os.close(nowhere)
        self._terminals = []
