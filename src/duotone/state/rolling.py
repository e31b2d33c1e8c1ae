"""Who rolls delayed scales and when: regions of autocast their forward states, a backward all others."""

import weakref
from typing import Any

import torch
from torch import Tensor

from duotone.state import history
from duotone.state.region import AutocastRegion, outermost_region

STATES: "weakref.WeakValueDictionary[str, Any]" = weakref.WeakValueDictionary()
"""Every `DelayedState` that lives, by its number."""


class Pending:
    """States that recorded outside of regions and have not rolled, each with the groups to reduce over."""

    def __init__(self) -> None:
        self.backward: dict[str, set[str]] = {}
        self.end: weakref.ref[EndOfBackward] | None = None

    def add(self, slot: Any, recorded: bool, running: bool) -> None:
        """A `DelayedSlot` was opened, while a backward is `running` or not."""
        self.forget_failed()
        if running:
            self.schedule()
        if recorded:
            region = None if running or slot.backward else outermost_region()
            states = self.backward if region is None else region.recorded
            states.setdefault(slot.state, set()).add(slot.group)

    def forget_failed(self) -> None:
        """After a backward that failed, its amaxes wait for the next one, and nobody reduces for it."""
        if self.end is not None and self.end() is None:
            self.end = None
            self.backward.clear()

    def schedule(self) -> None:
        """Roll when the outermost running backward ends: a nested one (reentrant recompute) finds it scheduled."""
        if self.end is None:
            end = EndOfBackward()
            torch.autograd.Variable._execution_engine.queue_callback(end)  # type: ignore[attr-defined]
            self.end = weakref.ref(end)

    def end_of_backward(self) -> None:
        self.end = None
        finished, self.backward = self.backward, {}
        roll(finished)


class EndOfBackward:
    """The callback of a running backward. The engine alone holds it, so that it dies with a backward that fails."""

    def __call__(self) -> None:
        PENDING.end_of_backward()


PENDING = Pending()


def end_of_region(region: AutocastRegion, *, failed: bool) -> None:
    """Roll what forward recorded in a region that has ended, unless another one of this thread and task is open."""
    finished, region.recorded = region.recorded, {}
    if failed:
        for number in finished:
            if number in STATES:
                STATES[number].forget_live()
        return
    remaining = outermost_region()
    if remaining is not None:
        for number, groups in finished.items():
            remaining.recorded.setdefault(number, set()).update(groups)
        return
    for number in finished:
        finished[number] |= PENDING.backward.pop(number, set())  # an optimizer's write, say: one roll for both
    roll(finished)


def roll_after(gradient: Tensor) -> None:
    """A hook for the output of a module whose forward alone is delayed: no op in its backward asks for the end."""
    PENDING.forget_failed()
    PENDING.schedule()


def roll(states: dict[str, set[str]]) -> None:
    """Reduce the live amaxes, one collective per group and device, and roll every state once."""
    found = {number: STATES[number] for number in states if number in STATES}
    groups = sorted({group for number in found for group in states[number] if group})
    for group in groups:
        members = [s for n, s in found.items() if group in states[n] and s.history.reduce_amax]
        history.reduce([state.amax_history for state in members], group)
    for state in found.values():
        state.roll()
