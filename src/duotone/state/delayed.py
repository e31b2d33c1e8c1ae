"""Delayed scaling: histories of amaxes as module buffers, recorded by an own op, rolled once per region or backward.

The op is opaque to compilers, so that eager and compiled code record alike; it finds its state by a number, which is a
constant of the graph. Who rolls when: a region of autocast its forward states when the outermost one ends; a backward
all others (gradient states, and forward states that no region encloses) from one callback at its end.

Forward code that runs inside a backward recomputes: with the scale that forward had (`frames`), without recording. Only
where forward ran without a graph inside an autograd.Function, as reentrant checkpoints do, it is the recompute that
records. A graph that recomputes by itself, compiled with its checkpoint, has the scale of the newest forward.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from duotone.comm import all_reduce, require_same
from duotone.dispatch import traced
from duotone.dispatch.stages import amax_of
from duotone.errors import UserError
from duotone.state import frames, history
from duotone.state.amax_mode import AMAX_MODES, AmaxMode, in_backward
from duotone.state.rolling import STATES, pending
from duotone.tensor.context import Slot
from duotone.tensor.history import History

FAKE = torch._C._TorchDispatchModeKey.FAKE
HAS_CUDA = torch.backends.cuda.is_built()
_NUMBERS = itertools.count(1)


class Scales:
    """The scales (n,) of a state between two rolls: `past` once they have moved on, None while the state has them."""

    def __init__(self) -> None:
        self.past: Tensor | None = None


class Step:
    """What a state remembers between a forward and its recompute. No attributes of a module: those are slow to set."""

    def __init__(self) -> None:
        self.now = Scales()
        self.before: Scales | None = None
        """The scales before the newest roll, while a recompute may ask for them."""
        self.deferred = False
        """Whether the newest forward left the recording to its recompute."""


class DelayedState(nn.Module):
    """Scales (n,) and amax history (L, n) of one module and direction; they stay fp32 whatever the module becomes.

    Row 0 of the history fills at present, the last row is the newest finished one. `largest` are the elements' largest
    magnitudes by slot, 0 where a slot is not used. Buffers keep their address while the length stays. `events` (2, n)
    counts the amaxes that were not finite and did not enter the history, and the spikes that entered as less.
    """

    scale: Tensor
    amax_history: Tensor
    events: Tensor

    def __init__(self, slots: int, parameters: History, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.history = parameters
        self.largest = [0.0] * slots
        self.register_buffer("scale", torch.ones(slots, dtype=torch.float32, device=device))
        length = parameters.amax_history_len
        self.register_buffer("amax_history", torch.zeros(length, slots, dtype=torch.float32, device=device))
        self.register_buffer("events", torch.zeros(2, slots, dtype=torch.int32, device=device), persistent=False)
        self.step = Step()
        self.name = ""
        self._register()

    def _register(self) -> None:
        self._views: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        self._new: set[int] | None = None
        self.started: set[int] = set()
        self.steps_with_new = 0
        self.number = str(next(_NUMBERS))
        STATES[self.number] = self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_views": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._register()

    def _apply(self, fn: Any, recurse: bool = True) -> "DelayedState":
        for name, buffer in self._buffers.items():
            assert buffer is not None
            moved = fn(buffer)
            if buffer.is_meta and not moved.is_meta:
                moved = torch.ones_like(moved) if name == "scale" else torch.zeros_like(moved)
            self._new = None
            self._buffers[name] = moved if moved.dtype == buffer.dtype else buffer.to(moved.device)
        return self

    def adopt(self, parameters: History) -> None:
        """Follow other parameters; the newest entries of the history and the scales stay."""
        if parameters.amax_history_len != self.amax_history.shape[0]:
            with torch.inference_mode(False):  # an inference tensor could not be written in training
                self.amax_history = history.resized(self.amax_history, parameters.amax_history_len)
        if parameters != self.history:
            self._new = None
        self.history = parameters

    @property
    def new(self) -> set[int]:
        """The slots that take their scale from the tensor that they meet first; none in TE's way.

        Looking at the device is left to `settle`: a slot may be among them that has a scale, which then stays.
        """
        if self._new is None:
            asks = self.history.first_scale_from_amax
            flags = history.is_new(self.amax_history, self.scale).tolist() if asks else []
            self._new = {slot for slot, is_new in enumerate(flags) if is_new}
            self.steps_with_new = 0
        return self._new

    def looks(self) -> bool:
        """Whether to look, at the end of a step, which slots are new no more: in steps 1, 2, 4, 8 and so on.

        Looking waits for the device, and an expert that gets no rows is new for ever.
        """
        if not self.started:
            return False
        self.steps_with_new += 1
        return self.steps_with_new.bit_count() == 1

    @torch.no_grad()
    def start(self, slots: slice, amaxes: Tensor, keep: bool) -> Tensor:
        """Scales (n,) where new ones among `slots` have that of their amaxes (fp32, one each): to `keep`, or a copy."""
        scale = self.scale if keep else self.scale.clone()
        if keep:
            self.started.update(range(scale.numel())[slots])
        columns, largest = self.amax_history[:, slots], self.largest[slots]
        scale[slots] = history.first(columns, scale[slots], amaxes, largest, self.history)
        return scale

    def records(self, mode: AmaxMode) -> bool:
        """Whether an amax that comes in this mode is recorded; a forward in a mode of its own starts a new step."""
        if mode is AmaxMode.RECOMPUTE:
            return self.step.deferred
        if mode is not AmaxMode.USE:
            self.step.before, self.step.deferred = None, mode is AmaxMode.DEFER
        return mode is AmaxMode.RECORD

    def scale_for(self, amax: Tensor | None, slot: int, recompute: bool = False) -> Tensor:
        """The encode scale of the slot, fp32 (1,): that of the forward for its recompute; records the amax, if any."""
        if amax is not None:
            live = self.amax_history[0, slot : slot + 1]
            live.copy_(torch.maximum(live, amax))
        return self.scales_of(self.used(recompute))[slot : slot + 1].clone()

    def used(self, recompute: bool) -> Scales:
        """The scales that a forward uses now, or a recompute."""
        step = self.step
        return step.before if recompute and step.before is not None else step.now

    def scales_of(self, scales: Scales) -> Tensor:
        return self._buffers["scale"] if scales.past is None else scales.past  # type: ignore[return-value]

    def views(self, slot: int, before: bool) -> tuple[Tensor, Tensor]:
        """The encode scale of the slot, fp32 (1,), for a recompute that of its forward; the bits of its live amax."""
        scale, amaxes = self.scales_of(self.used(before)), self._buffers["amax_history"]  # past nn.Module's look-up
        assert amaxes is not None
        found = self._views.get(slot)
        if found is None or found[0] is not scale or found[1] is not amaxes:
            live = amaxes[0, slot : slot + 1].view(torch.int32)
            found = self._views[slot] = scale, amaxes, scale[slot : slot + 1], live
        return found[2], found[3]

    @torch.no_grad()
    def forget_live(self) -> None:
        """Drop what a step recorded that failed."""
        self.amax_history[0].zero_()

    @torch.no_grad()
    def drop_nonfinite(self) -> None:
        """Keep live amaxes that are not finite from the other ranks of a reduction, unless they enter histories."""
        if self.history.skip_nonfinite_amax:
            self.amax_history[0].copy_(history.drop_nonfinite(self.amax_history[0], self.events))

    def roll(self) -> None:
        """End a step: the live row becomes the newest entry, and scales follow; slots that met nothing stay."""
        step = self.step
        amaxes, scale = self._buffers["amax_history"], self._buffers["scale"]
        assert amaxes is not None and scale is not None
        step.now.past = history.roll(amaxes, scale, self.largest, self.history, self.events)
        step.before, step.now, step.deferred = step.now, Scales(), False

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """A checkpoint without this state leaves it as it is; another length keeps the newest entries."""
        metadata, strict, _, unexpected, errors = args
        key = f"{prefix}amax_history"
        given = state_dict.get(key)
        if given is not None and given.dim() == 2 and given.shape != self.amax_history.shape:
            state_dict[key] = history.resized(given, self.amax_history.shape[0])
        absent: list[str] = []
        self._new = None
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, absent, unexpected, errors)


@dataclass(frozen=True)
class DelayedSlot(Slot):
    """One place in a `DelayedState`, as a value: the state's number, the index, and who reduces with it.

    `backward` slots roll at the end of the backward that records them. What has a slot (a plan, a parameter, the
    graph of a forward) keeps its state alive, also when the module is gone.
    """

    state: str
    index: int
    group: str = ""
    mode: AmaxMode = AmaxMode.RECORD
    backward: bool = False
    owner: "DelayedState | None" = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "owner", STATES.get(self.state))

    def scale_for(self, x: Tensor) -> Tensor:
        return torch.ops.duotone.delayed_scale(x, self.state, self.index, self.group, self.mode._value_, self.backward)

    @property
    def is_new(self) -> bool:
        return self.index in (self.owner or state_of(self.state)).new

    def events(self) -> tuple[int, int]:
        skipped, clamped = (self.owner or state_of(self.state)).events[:, self.index].tolist()
        return skipped, clamped

    def place(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        state, scale, live, mode = self._place(x.device)
        if self.index in state.new and mode is not AmaxMode.RECOMPUTE:
            scale = self._start(state, slice(self.index, self.index + 1), amax_of(x), mode)
        return scale, live

    def place_each(
        self, device: torch.device, count: int, distance: int, amaxes: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """As `place`, the first of `count` slots which lie that far apart; `amaxes` measures theirs, fp32 (count,)."""
        state, scale, live, mode = self._place(device)
        slots = range(self.index, self.index + distance * (count - 1) + 1, distance or 1)
        if mode is not AmaxMode.RECOMPUTE and not state.new.isdisjoint(slots):
            scale = self._start(state, slice(slots.start, slots.stop, slots.step), amaxes(), mode)
        return scale, live

    def _place(self, device: torch.device) -> tuple[DelayedState, Tensor, Tensor | None, AmaxMode]:
        state, mode, record = self.open()
        scale, live = state.views(self.index, before=mode is AmaxMode.RECOMPUTE)
        if scale.device != device:
            raise UserError(f"a delayed scale is on {scale.device} and what it scales on {device}; move one of them")
        return state, scale, live if record else None, mode

    def _start(self, state: DelayedState, slots: slice, amaxes: Tensor, mode: AmaxMode) -> Tensor:
        """The scale of the first slot, fp32 (1,), where some may be new; an evaluation keeps none."""
        if self.group and state.history.reduce_amax and mode is not AmaxMode.USE:
            require_same([f"{state.name} from slot {slots.start}"], amaxes.device, self.group)
            amaxes = all_reduce(history.finite(amaxes), "max", self.group)
        return state.start(slots, amaxes, mode is not AmaxMode.USE)[self.index : self.index + 1]

    def fixed(self) -> Slot:
        """Itself where a compiler traces or tensors are fake: the op recomputes as a checkpoint's does."""
        if torch.compiler.is_compiling() or torch._C._get_dispatch_mode(FAKE) is not None:
            return self
        state = self.owner or state_of(self.state)
        recomputes = self.mode is AmaxMode.RECOMPUTE or (not self.backward and in_backward())
        return FixedSlot(state, state.used(recomputes), self.index)

    def cast(self, x: Tensor, row: str, col: str, propagate: bool) -> tuple[Tensor, ...]:
        where = (self.state, self.index, self.group, self.mode._value_, self.backward)
        return torch.ops.duotone.delayed_planes(x, *where, row, col, propagate)

    def open(self) -> "tuple[DelayedState, AmaxMode, bool]":
        """The state, the mode that counts now, and whether the amax is recorded; the state will be rolled."""
        found, mode, running = self.owner or state_of(self.state), self.mode, in_backward()
        if running and mode is AmaxMode.RECORD and not self.backward:
            mode = AmaxMode.RECOMPUTE  # a graph that was compiled for the forward, recomputing
        if mode is not AmaxMode.USE and HAS_CUDA and torch.cuda.is_current_stream_capturing():
            raise UserError(
                "delayed scaling cannot be captured in a CUDA graph, whose replays record amaxes and move no scale; "
                "capture under fp8-current, or leave this module out of the graph"
            )
        key, earlier = ("scale", self.state, self.index), frames.recomputed() if running and not self.backward else None
        if earlier is not None:
            found.step.before, found.step.deferred = entry = earlier.take(key)
            record = found.step.deferred and mode is AmaxMode.RECOMPUTE and earlier.is_first_run
            mode = AmaxMode.RECOMPUTE
        elif running and self.mode is AmaxMode.RECOMPUTE:
            raise UserError(
                "a module under delayed scaling runs inside a backward and no checkpoint recomputes it, so its scale "
                "is not known; recompute through torch.utils.checkpoint, or call the module outside of the backward"
            )
        else:
            record = found.records(mode)
            entry = found.used(mode is AmaxMode.RECOMPUTE), found.step.deferred
        if not self.backward:
            frames.remember(key, entry)
        pending().add(self, record, running)
        return found, mode, record


@dataclass(frozen=True, eq=False)
class FixedSlot(Slot):
    """The scale that a slot had at one time, whatever its state has done since."""

    state: DelayedState
    scales: Scales
    index: int

    def scale_for(self, x: Tensor) -> Tensor:
        return self.state.scales_of(self.scales)[self.index : self.index + 1]


def state_of(number: str) -> DelayedState:
    """The state of a slot. Raises UserError where its module is gone."""
    found = STATES.get(number)
    if found is None:
        raise UserError("a delayed-scaling slot outlived its module; build the plan anew by calling the module")
    return found


_LIBRARY = torch.library.Library("duotone", "FRAGMENT")
# Not pure, and no part of a CUDA graph: a replay would record amaxes that nobody rolls.
TAGS = (torch.Tag.nondeterministic_seeded, *filter(None, [getattr(torch.Tag, "cudagraph_unsafe", None)]))
_LIBRARY.define(
    "delayed_scale(Tensor x, str state, int index, str group, str mode, bool backward) -> Tensor",
    tags=TAGS,
)


def _delayed_scale(x: Tensor, state: str, index: int, group: str, mode: str, backward: bool) -> Tensor:
    slot = DelayedSlot(state, index, group, AMAX_MODES[mode], backward)
    found, now, record = slot.open()
    is_new = now is not AmaxMode.RECOMPUTE and index in found.new
    amax = amax_of(x) if record or is_new else None
    if is_new:
        assert amax is not None
        first = slot._start(found, slice(index, index + 1), amax, now)
        if now is AmaxMode.USE:
            return first.clone()
    return found.scale_for(amax if record else None, index, now is AmaxMode.RECOMPUTE)


def _meta(x: Tensor, state: str, index: int, group: str, mode: str, backward: bool) -> Tensor:
    return x.new_empty((1,), dtype=torch.float32)


_LIBRARY.define(
    "delayed_planes(Tensor x, str state, int index, str group, str mode, bool backward,"
    " str row, str col, bool propagate) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=TAGS,
)


def _delayed_planes(x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    state, index, group, mode, backward, row, col, propagate = arguments
    scale, live = DelayedSlot(state, index, group, AMAX_MODES[mode], backward).place(x)
    return traced.cast(x, row, col, propagate, scale, live)


def _meta_planes(x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *_, row, col, _ = arguments
    return traced.empty(x, row, col)


_LIBRARY.impl("delayed_planes", _delayed_planes, "CUDA")
_LIBRARY.impl("delayed_planes", _meta_planes, "Meta")
for _key, _kernel in (("CPU", _delayed_scale), ("CUDA", _delayed_scale), ("Meta", _meta)):
    _LIBRARY.impl("delayed_scale", _kernel, _key)
