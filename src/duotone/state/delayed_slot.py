"""DelayedSlot: where one plane takes its delayed scale and records its amax, in eager and in compiled code.

Compilers see a custom op that finds the state by its number, so eager and compiled code record alike.

A recompute inside a backward uses the scale that its forward had (see `frames`) and records nothing. Only a forward
without a graph inside an autograd.Function, as reentrant checkpoints run it, leaves the recording to the recompute. A
graph that recomputes by itself, because it was compiled with its checkpoint, uses the scale of its own forward, too.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import is_

import torch
from torch import Tensor

from duotone.capture import is_capturing
from duotone.comm import all_reduce, require_same
from duotone.dispatch.stages import amax_of
from duotone.errors import UserError
from duotone.graph_ops import STATEFUL, define_op
from duotone.state import frames, history
from duotone.state.delayed import STATES, DelayedState, Scales, state_of
from duotone.state.region import AMAX_MODES, EVALUATION, WRITES, AmaxMode, in_backward
from duotone.state.rolling import pending
from duotone.state.torch_private import graph_task_id, is_faking
from duotone.tensor.context import OpenSlot, Slot
from duotone.tensor.history import clips


@dataclass(frozen=True)
class DelayedSlot(Slot):
    """One slot of a `DelayedState`, as a value: the number of the state, the index, and the group that reduces amaxes.

    `backward` slots roll at the end of the backward that records them. A slot keeps its state alive after the module
    is gone: plans, parameters and the graph of a forward hold slots.
    """

    state: str
    index: int
    group: str = ""
    mode: AmaxMode = AmaxMode.RECORD
    backward: bool = False
    owner: DelayedState | None = field(init=False, compare=False, repr=False)

    is_openable = True
    key: tuple[str, str, int] = field(init=False, compare=False, repr=False)
    """Under which `frames` keeps the scales of a forward."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "owner", STATES.get(self.state))
        object.__setattr__(self, "key", ("scale", self.state, self.index))

    def scale_for(self, x: Tensor) -> Tensor:
        return torch.ops.duotone.delayed_scale(x, self.state, self.index, self.group, self.mode._value_, self.backward)

    def serves(self, other: Slot | None) -> bool:
        """As `Slot.serves`. Layers share graphs that only read a weight; one that writes holds the state's number."""
        if self.state in TRACED or not isinstance(other, DelayedSlot):
            return self == other
        return replace(self, state=other.state) == other

    @property
    def is_new(self) -> bool:
        """Whether the slot has no scale yet."""
        return self.index in self.holder.new

    @property
    def holder(self) -> DelayedState:
        """The state. UserError if its module is gone."""
        return self.owner or state_of(self.state)

    def for_writes(self, by_training: bool) -> Slot:
        return self if self.backward else replace(self, mode=AmaxMode.STEP if by_training else AmaxMode.WRITE)

    def events(self) -> tuple[int, int]:
        return tuple(self.holder.events[:, self.index].tolist())  # type: ignore[return-value]  # a column has two

    def place(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.place_each(x.device, 1, 0, lambda: amax_of(x))

    def place_each(
        self, device: torch.device, count: int, distance: int, amaxes: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """`place` for the first of `count` slots, `distance` apart; `amaxes` measures theirs, fp32 (count,)."""
        return self.open().place_each(device, count, distance, amaxes)

    def upcoming(self, amax: Tensor) -> Tensor:
        here = slice(self.index, self.index + 1)
        return (self.holder.start(here, amax, keep=False) if self.is_new else self.holder.scale)[here].clone()

    def fit(self, amax: Tensor) -> None:
        state, here = self.holder, range(self.index, self.index + 1)
        amax = amax.to(state.scale.device)
        if not amax.is_meta and clips(amax, self.upcoming(amax), state.largest[self.index]):
            self.start(state, here, amax, AmaxMode.WRITE, state.history.first_scale_from_amax)

    def record(self, amax: Tensor) -> None:
        _, live = self.place_each(amax.device, 1, 0, lambda: amax)
        if live is not None:
            _raise_to(live, amax)

    def start(self, state: DelayedState, slots: range, amaxes: Tensor, mode: AmaxMode, fits: bool) -> Tensor:
        """The scale of the first slot, fp32 (1,), after slots took theirs from amaxes. An evaluation keeps none."""
        agrees = self.group and state.history.reduce_amax and mode not in EVALUATION
        if agrees and not state.new.isdisjoint(slots):
            require_same([f"{state.name} from slot {slots.start}"], amaxes.device, self.group)
            amaxes = all_reduce(history.finite(amaxes), "max", self.group)
        scales = state.start(slice(slots.start, slots.stop, slots.step), amaxes, mode not in EVALUATION, fits)
        return scales[self.index : self.index + 1]

    def scale_now(self, x: Tensor) -> Tensor | None:
        if torch.compiler.is_dynamo_compiling() or is_faking():
            return None  # there the op recomputes
        recomputes = self.mode is AmaxMode.RECOMPUTE or (not self.backward and in_backward())
        return self.holder.scales_of(self.holder.used(recomputes))[self.index : self.index + 1].clone()

    def open(self) -> "OpenDelayedSlot":
        return DelayedSlots([self]).open()[0]

    def together(self, slots: Sequence["DelayedSlot"]) -> "list[Callable[[], list[OpenDelayedSlot]]]":
        alike = groupby(slots, lambda slot: (slot.state, slot.mode))
        return [DelayedSlots([*group]).open for _, group in alike]


class DelayedSlots:
    """Slots of one state and one mode, which a call opens together."""

    def __init__(self, slots: Sequence[DelayedSlot]) -> None:
        self.slots, self.first, self.indices = slots, slots[0], [slot.index for slot in slots]
        self.opened: tuple[tuple[object, ...], list[OpenDelayedSlot]] | None = None
        """What the newest call opened, by what decides it: buffers, the history rule, the mode, the recording."""

    def open(self) -> "list[OpenDelayedSlot]":
        """Each slot as one call uses it. The state will roll if the call records."""
        first, running = self.first, graph_task_id() != -1
        state, mode, backward = first.owner or state_of(first.state), first.mode, first.backward
        if running and mode is AmaxMode.RECORD and not backward:
            mode = AmaxMode.RECOMPUTE  # a graph that was compiled for the forward, recomputing
        if mode is AmaxMode.USE and state.is_foreign:  # a scale that clips gives way
            mode = AmaxMode.FIT
        step = state.step
        is_write = mode in WRITES
        earlier = frames.recomputed() if running and not (backward or is_write) else None
        if earlier is not None:
            entries = [earlier.take(slot.key) for slot in self.slots]
            step.before, step.deferred = entries[0]
            record = step.deferred and mode is AmaxMode.RECOMPUTE and earlier.is_first_run
            _warn_in_flight(record, entries[0][0])
            mode = AmaxMode.RECOMPUTE
        elif running and first.mode is AmaxMode.RECOMPUTE:
            raise UserError(
                "a module under delayed scaling runs inside a backward and no checkpoint recomputes it, so its scale "
                "is not known; recompute through torch.utils.checkpoint, or call the module outside of the backward"
            )
        else:
            record = state.records(mode)
            scales = step.now
            if mode is AmaxMode.RECOMPUTE:
                forward = frames.of_graph(first.key)
                scales = state.used(True) if forward is None else forward[0]
            entries = [(scales, step.deferred)] * len(self.slots)
        if not backward:
            frames.remember_for_graph([(slot.key, entry) for slot, entry in zip(self.slots, entries, strict=True)])
        pending().add(first.state, first.group, record, running, backward, is_write)
        return self._opened(state, entries, mode, record)

    def _opened(
        self, state: DelayedState, entries: Sequence[tuple[Scales, bool]], mode: AmaxMode, record: bool
    ) -> "list[OpenDelayedSlot]":
        """The slots for these entries of `frames`. Those of present scales serve later steps too."""
        new = state.new if mode is not AmaxMode.RECOMPUTE else set[int]()
        is_steady = entries[0][0] is state.step.now and (not new or new.isdisjoint(self.indices))
        buffers = state._buffers  # past nn.Module's look-up
        key = buffers["scale"], buffers["amax_history"], state.history, mode, record
        if is_steady and self.opened is not None and all(map(is_, self.opened[0], key)):
            return self.opened[1]
        pairs = zip(self.slots, entries, strict=True)
        opened = [OpenDelayedSlot(slot, state, scales, mode, record, slot.index in new) for slot, (scales, _) in pairs]
        self.opened = (key, opened) if is_steady else None
        return opened


class OpenDelayedSlot(OpenSlot):
    """A delayed slot that a call has opened, with the scales and the mode that hold for that call."""

    def __init__(
        self, slot: DelayedSlot, state: DelayedState, scales: Scales, mode: AmaxMode, record: bool, is_new: bool
    ) -> None:
        self.slot, self.state, self.mode = slot, state, mode
        self.fits = mode in (AmaxMode.FIT, AmaxMode.WRITE) and state.history.first_scale_from_amax
        self.is_new, self.is_steady = is_new, not (is_new or (self.fits and mode is AmaxMode.WRITE))
        self.scale, live = state.views(slot.index, scales)
        self.live = live if record else None
        self.tensors = (state.scale, state.amax_history) if self.fits else (self.scale, self.live)
        real = type(live) is Tensor  # fake tensors have no address
        self.key = record, self.fits, live.get_device(), *[real and x.data_ptr() & 15 for x in (self.scale, live)]

    def scale_for(self, x: Tensor) -> Tensor:
        return measured_scale(self, x)

    def place(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.place_each(x.device, 1, 0, lambda: amax_of(x))

    def place_each(
        self, device: torch.device, count: int, distance: int, amaxes: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        scale, state, mode, first = self.scale, self.state, self.mode, self.slot.index
        if scale.device != device:
            raise UserError(f"a delayed scale is on {scale.device} and what it scales on {device}; move one of them")
        if self.fits and mode is AmaxMode.WRITE and state.step.is_first and not is_capturing():
            state.forget([first])  # the history is of earlier values, and no step has used it
        slots = range(first, first + distance * (count - 1) + 1, distance or 1)
        if self.fits or not (mode is AmaxMode.RECOMPUTE or state.new.isdisjoint(slots)):
            scale = self.slot.start(state, slots, amaxes(), mode, self.fits)
        return scale, self.live

    def scale_now(self, x: Tensor) -> Tensor:
        return self.scale.clone()


def _warn_in_flight(records: bool, scales: Scales) -> None:
    """Warn of a recompute that records after another one has ended the step. `scales`: those of its forward."""
    if records and scales.rolled is not None:
        warnings.warn(
            "several forwards of a reentrant checkpoint precede their backwards, so delayed scales follow the amaxes "
            "of the last of these backwards alone; pass use_reentrant=False",
            stacklevel=2,
        )


TRACED: set[str] = set()
"""Numbers of states that graphs hold."""


def measured_scale(slot: Slot, x: Tensor) -> Tensor:
    """The scale of a slot, fp32 (1,), which records the amax of `x`."""
    scale, live = slot.place(x)
    if live is not None:
        _raise_to(live, amax_of(x))
    return scale.clone()


def _raise_to(live: Tensor, amax: Tensor) -> None:
    """Record an amax, fp32 (1,). No amax is negative, so bits order as values."""
    live.copy_(torch.maximum(live, amax.view(torch.int32)))


def _delayed_scale(x: Tensor, state: str, index: int, group: str, mode: str, backward: bool) -> Tensor:
    return measured_scale(DelayedSlot(state, index, group, AMAX_MODES[mode], backward), x)


def _empty_scale(x: Tensor, state: str, *_: object) -> Tensor:
    TRACED.add(state)
    return x.new_empty((1,), dtype=torch.float32)


_PLACE = "str state, int index, str group, str mode, bool backward"
define_op(f"delayed_scale(Tensor x, {_PLACE}) -> Tensor", _delayed_scale, _empty_scale, tags=STATEFUL)
