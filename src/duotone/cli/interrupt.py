"""Ctrl-C asks a run to stop after what it is at; a second one stops at once."""

import os
import signal
from types import FrameType, TracebackType

EXIT_CODE = 130
STDERR = 2
"""A handler may run inside a write to the stream, so it writes past it."""


class Interrupt:
    """While active, the first SIGINT only sets `requested`; the second raises KeyboardInterrupt.

    `unit` is what a run finishes before it stops.
    """

    def __init__(self, unit: str = "step") -> None:
        self.requested, self.unit = False, unit

    def __enter__(self) -> "Interrupt":
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def __call__(self) -> bool:
        return self.requested

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        os.write(STDERR, f"stopping after this {self.unit}; Ctrl-C again stops at once\n".encode())
