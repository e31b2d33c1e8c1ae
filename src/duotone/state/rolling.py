"""When delayed scales roll. A region of autocast rolls its forward states at its end. A backward rolls all others.

One kernel rolls all states of a device.
"""

import sys
import threading
import warnings
import weakref
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from duotone.capture import is_capturing
from duotone.comm import require_same
from duotone.errors import UserError
from duotone.numbered import never_compiled
from duotone.state import history, torch_private
from duotone.state.delayed import STATES, DelayedState, RollTable
from duotone.state.region import STACK, AutocastRegion, Recorded, Recording, outermost_region
from duotone.state.torch_private import MICROBATCH, PIPELINES, in_pipeline
from duotone.tensor.history import History

ALONE = (
    "delayed scales of this pipeline move at the end of each backward, so they depend on its schedule; run "
    "schedule.step inside duotone.autocast, and they move once a step, as in one process"
)

OLD_REGION = (
    "a CUDA graph captures delayed scaling in an autocast region that is older than the capture, so no replay would "
    "roll its scales; enter duotone.autocast inside of what is captured, or convert the model with the recipe and "
    "capture without autocast"
)


LONG_REGION = (
    "{} backwards ended inside of one duotone.autocast region, and delayed scales of forward roll only at its end; "
    "enter autocast in each step"
)
MANY_BACKWARDS = 32
"""More than the microbatches of most steps."""


class Pending:
    """States that recorded outside of regions in one thread and have not rolled yet.

    torch hands the object that a thread stashed to the threads of the backwards that it starts.
    """

    def __init__(self) -> None:
        self.backward: Recorded = set()
        self.written: Recorded = set()
        """Written inside of a running backward: they roll with the next step, as after a write behind the backward."""
        self.in_capture = False
        """Whether a CUDA graph holds some of them."""
        self.end: weakref.ref[partial[None]] | None = None
        self.thread = threading.current_thread()
        self.has_backwards = False
        self.region: AutocastRegion | None = None
        """The region in which the newest amax was recorded that rolls at its end."""
        with LOCK:
            THREADS[:] = [t for t in THREADS if t.backward or t.thread.is_alive() or t is OTHERS]
            THREADS.append(self)

    def add(self, state: str, group: str, recorded: bool, running: bool, backward: bool, write: bool) -> None:
        """A slot of the state was opened, a `backward` slot or for a `write`, while a backward is `running` or not."""
        if self.end is not None and self.end() is None:
            self.forget_failed()
        if running and self.end is None:
            self.schedule()
        if recorded:
            region = None if running or backward or STACK.variable.get(None) == () else outermost_region()
            captured = is_capturing()
            if region is not None and captured and not region.in_capture:
                raise UserError(OLD_REGION)
            waits = self.written if write and running else self.backward
            (waits if region is None else region.recorded).add(Recording(state, group, captured))
            self.in_capture |= captured
            if region is None and not (backward or running) and PIPELINES in sys.modules and in_pipeline(MICROBATCH):
                warnings.warn(ALONE, stacklevel=2)
            if region is not None:  # the write of an optimizer rolls with the region, not with a backward in it
                self.region = region
                self.backward -= {Recording(state, each, captured) for each in (group, "")}

    def forget_failed(self) -> None:
        """Forget the recordings of a failed backward. Its amaxes stay in their histories and count in the next step."""
        if self.end is not None and self.end() is None:
            self.end = None
            self.backward, self.written = self.written, set()

    def schedule(self) -> None:
        """Roll when the outermost running backward ends. A nested one, of a reentrant recompute, schedules nothing."""
        end = partial(self.end_of_backward)  # only the engine holds it, so it dies with a backward that fails
        torch_private.queue_callback(end)
        self.end = weakref.ref(end)
        self.has_backwards = True

    @never_compiled
    def end_of_backward(self) -> None:
        """Roll the amaxes of this thread, and of the threads whose backward runs in this one."""
        self.end = None
        self.warn_in_long_region()
        finished = self.take()
        with LOCK:
            others = [other for other in THREADS if other.backward and self._serves(other)]
        for other in others:
            finished |= other.take()
        self.backward, self.written = self.backward | self.written, set()
        roll(finished)

    def warn_in_long_region(self) -> None:
        """Warn once if so many backwards end in one region that it is around the loop of a training."""
        region = self.region
        if region is not None and region.is_open and region.recorded:
            region.backwards += 1
            if region.backwards == MANY_BACKWARDS:
                warnings.warn(LONG_REGION.format(MANY_BACKWARDS), stacklevel=2)

    def take(self) -> Recorded:
        """The recordings that roll now. A capture rolls its own. Others wait for a backward outside of the capture."""
        captures = is_capturing()
        if not (captures or self.in_capture):
            finished, self.backward = self.backward, set()
            return finished
        self.in_capture = False
        finished = {recording for recording in self.backward if recording.in_capture or not captures}
        self.backward -= finished
        if not captures and any(recording.in_capture for recording in finished):
            warnings.warn(
                "a CUDA graph records amaxes of delayed scaling, and no backward was captured with it, so that its "
                "replays move no scale; capture a whole step, or use torch.cuda.make_graphed_callables",
                stacklevel=2,
            )
        return {recording for recording in finished if recording.in_capture is captures}

    def _serves(self, other: "Pending") -> bool:
        """Whether a backward of this thread also rolls what `other` recorded, as for DataParallel's replicas."""
        return self is OTHERS or not other.has_backwards or not other.thread.is_alive()


LOCK, KEY = threading.Lock(), "duotone_pending"
THREADS: list[Pending] = []


def pending() -> Pending:
    """The pending states of the calling thread. In a backward: those of the thread that started it."""
    if torch_private.has_thread_object(KEY):
        return torch_private.thread_object(KEY)
    if torch_private.graph_task_id() != -1:
        return OTHERS
    return torch_private.set_thread_object(KEY, Pending())


OTHERS = Pending()
"""The pending states of backwards in threads that ran no forward."""


def wait_like_original(number: str, group: str) -> None:
    """Roll a copy at the end of the next backward if it has amaxes, such as those of an optimizer's write."""
    state = STATES[number]
    if state.is_fresh_copy and not is_capturing() and not torch_private.is_faking():
        state.is_fresh_copy = False
        if state.amax_history[0].any():
            pending().backward.add(Recording(state.number, group, False))


@never_compiled
def end_of_region(region: AutocastRegion, *, failed: bool) -> None:
    """Roll the forward states of a region that has ended. An open region of this thread and task takes them over."""
    finished, region.recorded = region.recorded, set()
    if failed:
        for recording in finished:
            if recording.state in STATES:
                STATES[recording.state].forget_live()
        return
    remaining = outermost_region()
    if remaining is not None:
        remaining.recorded |= finished
        return
    waiting, numbers = pending(), {recording.state for recording in finished}
    together = {
        recording for recording in waiting.backward if recording.state in numbers
    }  # for example by the write of an optimizer
    waiting.backward -= together
    roll(finished | together)


@never_compiled
def roll_after(gradient: Tensor) -> None:
    """A hook for the output of a module whose gradient is not delayed, so that no slot of its backward schedules."""
    waiting = pending()
    waiting.forget_failed()
    if waiting.end is None:
        waiting.schedule()


def roll(recorded: Recorded) -> None:
    """Reduce the live amaxes, one collective per group and device, and roll every state once.

    Raises UserError on all ranks of a group, before any state moves, if they did not record the same states.
    """
    records = sorted(recorded)  # equal sets come in one order, and so share a table of what rolls together
    living = {record.state: state for record in records if (state := STATES.get(record.state)) is not None}
    members: dict[str, list[DelayedState]] = {}
    for group in sorted({record.group for record in records if record.group and record.state in living}):
        states = [living[record.state] for record in records if record.group == group and record.state in living]
        members[group] = sorted([s for s in states if s.history.reduce_amax], key=lambda state: state.name)
    try:
        for group, reducing in members.items():
            parameters = {each: repr(each) for each in {state.history for state in reducing}}
            names = [f"{state.name} {state.scale.numel()} {parameters[state.history]}" for state in reducing]
            if names:
                require_same(names, reducing[0].scale.device, group)
    except UserError:
        for state in living.values():
            state.forget_live()
        raise
    for group, reducing in members.items():
        for state in reducing:
            state.drop_nonfinite()
        history.reduce([state.amax_history for state in reducing], group)
    roll_all(living.values())
    settle(living.values())


def settle(states: Collection[DelayedState]) -> None:
    """Read which new slots have scales now, with one copy from each device."""
    waiting = [state for state in states if state.started and state.looks()]
    for device in {state.scale.device for state in waiting}:
        on_device = [state for state in waiting if state.scale.device == device]
        flags = torch.cat([history.is_new(state.amax_history, state.scale) for state in on_device]).tolist()
        for state in on_device:
            are_new, flags = flags[: state.scale.numel()], flags[state.scale.numel() :]
            state.new.difference_update([slot for slot in state.started if not are_new[slot]])
            state.started.clear()


def roll_all(states: Iterable[DelayedState]) -> None:
    """End a step of every state. Those that share a history rule and a device roll together, by a kernel if one can."""
    batches: dict[tuple[int, int], list[tuple[DelayedState, RollTable]]] = {}
    without_kernel: dict[tuple[History, int, torch.device], list[DelayedState]] = {}
    for state in states:
        table = _table_of(state)
        if table is not None:
            batches.setdefault(table.alike, []).append((state, table))
        elif history.is_joinable(state.history):
            without_kernel.setdefault((state.history, len(state.amax_history), state.scale.device), []).append(state)
        else:
            state.roll()
    for batch in batches.values():
        before = _roll_in_one_kernel(batch[0][0].history, [table for _, table in batch])
        _end_step([state for state, _ in batch], before)
    for alike in without_kernel.values():
        if len(alike) == 1:
            alike[0].roll()
        else:
            _end_step(alike, _roll_joined(alike))


def _end_step(states: Sequence[DelayedState], before: Tensor) -> None:
    """`before`: the scales of all states before they rolled, one state after the other."""
    end = 0
    for state in states:
        start, end = end, end + len(state.largest)
        state.end_step(before, slice(start, end))


@torch.no_grad()
def _roll_joined(states: Sequence[DelayedState]) -> Tensor:
    """Roll copies of the buffers as those of one state, and copy them back. Returns the scales before."""
    buffers = [*zip(*[(state.amax_history, state.scale, state.events) for state in states], strict=True)]
    amaxes, scale, events = (torch.cat(each, -1) for each in buffers)
    largest, slots = [value for state in states for value in state.largest], [len(state.largest) for state in states]
    before = history.roll(amaxes, scale, largest, states[0].history, events)
    for each, joined in zip(buffers, (amaxes, scale, events), strict=True):
        torch._foreach_copy_(each, joined.split(slots, -1))  # type: ignore[reportPrivateImportUsage]
    return before


def _roll_in_one_kernel(parameters: History, tables: list[RollTable]) -> Tensor:
    from duotone.kernels.roll import roll

    join = _joined.__wrapped__ if is_capturing() else _joined  # memory of a CUDA graph holds no values before a replay
    table = join(*tables)
    recent = parameters.amax_compute_algo != "max"
    skip, spike = parameters.skip_nonfinite_amax, parameters.spike_factor
    return roll(table.addresses, table.limits, parameters.amax_history_len, recent, skip, spike)


@lru_cache(maxsize=64)
def _joined(*tables: RollTable) -> RollTable:
    return RollTable(torch.cat([t.addresses for t in tables]), torch.cat([t.limits for t in tables]))


def _table_of(state: DelayedState) -> RollTable | None:
    """The table of one state, kept until one of its buffers moves; None if no kernel rolls it.

    UserError if a capture comes before the table.
    """
    buffers = state._buffers  # past nn.Module's slow look-up
    scale, amaxes, events = buffers["scale"], buffers["amax_history"], buffers["events"]
    assert scale is not None and amaxes is not None and events is not None
    if not scale.is_cuda:
        return None
    key = (state.history, scale.data_ptr(), amaxes.data_ptr(), events.data_ptr(), *state.largest)
    if state.roll_table is None or state.roll_table[0] != key:
        state.roll_table = key, _new_table(state) if history.has_kernel(state.amax_history, state.history) else None
    return state.roll_table[1]


def _new_table(state: DelayedState) -> RollTable:
    from duotone.kernels.roll import addresses

    if is_capturing():
        raise UserError(
            "a CUDA graph captures a module under delayed scaling that has finished no step; run a step of forward "
            "and backward before the capture, as torch.cuda.make_graphed_callables does by itself"
        )
    limits = history.limits(tuple(state.largest), state.history.margin, state.scale.device)
    alike = id(state.history), limits.get_device()
    return RollTable(addresses(state.amax_history, state.scale, state.events), limits, alike)
