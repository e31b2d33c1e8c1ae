"""Who rolls delayed scales and when: regions of autocast their forward states, a backward all others."""

import threading
import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from duotone.comm import require_same
from duotone.errors import UserError
from duotone.state import history
from duotone.state.region import AutocastRegion, outermost_region

STATES: "weakref.WeakValueDictionary[str, Any]" = weakref.WeakValueDictionary()
"""Every `DelayedState` that lives, by its number."""


class Pending:
    """States that recorded outside of regions and have not rolled, each with the groups to reduce over: of one thread.

    torch hands the object that a thread stashed to the threads of the backwards that it starts.
    """

    def __init__(self) -> None:
        self.backward: dict[str, set[str]] = {}
        self.end: weakref.ref[EndOfBackward] | None = None
        self.thread = threading.current_thread()
        self.has_backwards = False
        with LOCK:
            THREADS.append(self)

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
            end = EndOfBackward(self)
            torch.autograd.Variable._execution_engine.queue_callback(end)  # type: ignore[attr-defined]
            self.end = weakref.ref(end)
            self.has_backwards = True

    def end_of_backward(self) -> None:
        self.end = None
        finished, self.backward = self.backward, {}
        for other in self._served():
            records, other.backward = other.backward, {}
            for number, groups in records.items():
                finished.setdefault(number, set()).update(groups)
        roll(finished)

    def _served(self) -> list["Pending"]:
        """The threads that leave backwards to others, as those of DataParallel's replicas do; all for `OTHERS`."""
        with LOCK:
            served = [t for t in THREADS if self is OTHERS or not t.has_backwards or not t.thread.is_alive()]
            THREADS[:] = [t for t in THREADS if t.thread.is_alive() or t is OTHERS]
        return served


LOCK, KEY = threading.Lock(), "duotone_pending"
THREADS: list[Pending] = []


def pending() -> Pending:
    """What waits in the calling thread, and in a backward in the thread that started it."""
    if torch._C._is_key_in_tls(KEY):  # type: ignore[attr-defined]
        return torch._C._get_obj_in_tls(KEY)  # type: ignore[attr-defined]
    if torch._C._current_graph_task_id() != -1:
        return OTHERS
    made = Pending()
    torch._C._stash_obj_in_tls(KEY, made)  # type: ignore[attr-defined]
    return made


class EndOfBackward:
    """The callback of a running backward. The engine alone holds it, so that it dies with a backward that fails."""

    def __init__(self, waiting: Pending) -> None:
        self.waiting = waiting

    def __call__(self) -> None:
        self.waiting.end_of_backward()


OTHERS = Pending()
"""Of backwards whose thread has run no forward."""


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
        finished[number] |= pending().backward.pop(number, set())  # an optimizer's write, say: one roll for both
    roll(finished)


def roll_after(gradient: Tensor) -> None:
    """A hook for the output of a module whose forward alone is delayed: no op in its backward asks for the end."""
    waiting = pending()
    waiting.forget_failed()
    waiting.schedule()


def roll(states: dict[str, set[str]]) -> None:
    """Reduce the live amaxes, one collective per group and device, and roll every state once.

    Raises UserError on all ranks of a group, and no state moves, where they did not record the same.
    """
    found = {number: STATES[number] for number in states if number in STATES}
    members: dict[str, list[Any]] = {}
    for group in sorted({group for number in found for group in states[number] if group}):
        reducing = [state for n, state in found.items() if group in states[n] and state.history.reduce_amax]
        members[group] = sorted(reducing, key=lambda state: state.name)
    try:
        for group, reducing in members.items():
            names = [f"{state.name} {state.scale.numel()}" for state in reducing]
            if names:
                require_same(names, reducing[0].scale.device, group)
    except UserError:
        for state in found.values():
            state.forget_live()
        raise
    for group, reducing in members.items():
        for state in reducing:
            state.drop_nonfinite()
        history.reduce([state.amax_history for state in reducing], group)
    for state in found.values():
        state.roll()
    settle(found.values())


def settle(states: Collection[Any]) -> None:
    """See which slots that started have scales now, by one look at each device."""
    waiting = [state for state in states if state.looks()]
    for device in {state.scale.device for state in waiting}:
        here = [state for state in waiting if state.scale.device == device]
        flags = torch.cat([history.is_new(state.amax_history, state.scale) for state in here]).tolist()
        for state in here:
            mine, flags = flags[: state.scale.numel()], flags[state.scale.numel() :]
            state.new.difference_update([slot for slot in state.started if not mine[slot]])
            state.started.clear()
