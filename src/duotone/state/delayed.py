"""DelayedState: the scales and the amax history of one module and direction, as module buffers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from duotone.capture import is_capturing
from duotone.errors import UserError
from duotone.numbered import Numbered
from duotone.state import history
from duotone.state.region import EVALUATION, WRITES, AmaxMode
from duotone.tensor.history import History


class Scales:
    """The scales (n,) between two rolls. `past` is their copy after the second one; before, the state holds them."""

    rolled: tuple[Tensor, slice] | None = None
    """The copies of all states that rolled together, and where those of this one lie. Only a recompute reads them."""

    @property
    def past(self) -> Tensor | None:
        """The copy, (n,). None if nothing rolled since."""
        return None if self.rolled is None else self.rolled[0][self.rolled[1]]


class Step:
    """What a state remembers from a forward for its recompute. Attributes of a module would be slow to set."""

    before: Scales | None = None
    """The scales before the newest roll, while a recompute may ask for them."""
    deferred = False
    """Whether the newest forward left the recording to its recompute."""
    is_first = True
    """Whether no step has ended, and no checkpoint was loaded."""
    version = 0
    """Of the scales, after the last write of Duotone."""

    def __init__(self) -> None:
        self.now = Scales()


@dataclass(eq=False)
class RollTable:
    """`addresses` int64 (n, 4), see `duotone.kernels.roll`; `limits` fp32 (n,): MAX 2^-margin of each slot."""

    addresses: Tensor
    limits: Tensor
    alike: tuple[int, int] = (0, 0)
    """Equal for states that roll in one launch."""


class DelayedState(nn.Module):
    """Scales (n,) and amax history (L, n), fp32 whatever dtype the module is cast to.

    Row 0 of the history fills in this step; the last row is the newest finished one. `largest` is the largest magnitude
    of each slot's element, 0 for a slot without use. `events` int32 (2, n) counts amaxes that were not finite and did
    not enter the history, and spikes that entered as something smaller. Buffers keep their address while L stays.
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
        self._new: set[int] | None = None
        self.roll_table: tuple[tuple[object, ...], RollTable | None] | None = None
        self.started: set[int] = set()
        self.steps_with_new = 0
        self._note_write()
        self.number = STATES.add(self)
        self.is_fresh_copy = False
        """Whether this is a copy whose original may wait for a roll, and `wait_like_original` has not run."""

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "roll_table": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._register()
        self.is_fresh_copy = True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "DelayedState":
        for name, buffer in self._buffers.items():
            assert buffer is not None
            moved = fn(buffer)
            if buffer.is_meta and not moved.is_meta:
                moved = torch.ones_like(moved) if name == "scale" else torch.zeros_like(moved)
            self._new = None
            self._buffers[name] = moved if moved.dtype == buffer.dtype else buffer.to(moved.device)
        self._note_write()
        return self

    def _note_write(self) -> None:
        scale = self._buffers["scale"]
        assert scale is not None
        self.step.version = 0 if scale.is_inference() else scale._version  # an inference tensor counts no writes

    @property
    def is_foreign(self) -> bool:
        """Whether something else wrote the scales, as an average of buffers does. They may fit no model.

        A load of a state_dict does not count.
        """
        scale = self._buffers["scale"]
        return scale is not None and not scale.is_inference() and scale._version != self.step.version

    def adopt(self, parameters: History) -> None:
        """Follow other parameters. The scales and the newest entries of the history stay."""
        if parameters.amax_history_len != self.amax_history.shape[0]:
            with torch.inference_mode(False):  # an inference tensor could not be written in training
                self.amax_history = history.resized(self.amax_history, parameters.amax_history_len)
        if parameters != self.history:
            self._new = None
        self.history = parameters

    @property
    def new(self) -> set[int]:
        """The slots that take their scale from their first tensor; none without `first_scale_from_amax`.

        It may contain slots that have a scale by now, and keep it: only `rolling.settle` looks at the device.
        """
        asks = self.history.first_scale_from_amax
        if self._new is None and asks and is_capturing():  # the host may not look at the device now
            return set(range(self.scale.numel()))
        if self._new is None:
            flags = history.is_new(self.amax_history, self.scale).tolist() if asks else []
            self._new = {slot for slot, is_new in enumerate(flags) if is_new}
            self.steps_with_new = 0
        return self._new

    def looks(self) -> bool:
        """Whether to look at the end of this step which slots have scales now: in steps 1, 2, 4, 8 and so on.

        Looking waits for the device, and the slot of an expert that gets no rows stays new.
        """
        if not self.started or is_capturing():
            return False
        self.steps_with_new += 1
        return self.steps_with_new.bit_count() == 1

    @torch.no_grad()
    def start(self, slots: slice, amaxes: Tensor, keep: bool, fits: bool = False) -> Tensor:
        """Scales (n,) in which new slots among `slots` follow from their amaxes, fp32 (len(slots),).

        With `fits` so do slots whose scale does not fit, and their history starts anew. The scales and the history go
        into the buffers if `keep`, else into copies.
        """
        scale, indices = self.scale if keep else self.scale.clone(), range(len(self.largest))[slots]
        if keep:
            self.started.update(indices)
        columns, largest = self.amax_history[:, slots], self.largest[slots]
        if not self.new.isdisjoint(indices):
            scale[slots] = history.first(columns, scale[slots], amaxes, largest, self.history)
        if fits:
            misfits, scale[slots] = history.fitting(scale[slots], amaxes, largest, self.history)
            if keep:
                columns.masked_fill_(misfits, 0.0)
        if keep:
            self._note_write()
        return scale

    def records(self, mode: AmaxMode) -> bool:
        """Whether an amax is recorded in this mode. A forward that tracks gradients starts a new step."""
        if mode is AmaxMode.RECOMPUTE:
            return self.step.deferred
        if mode not in EVALUATION:
            self.step.before, self.step.deferred = None, mode is AmaxMode.DEFER
        return mode is AmaxMode.RECORD or mode in WRITES

    def used(self, recompute: bool) -> Scales:
        """The scales that a forward uses now, or those of the forward that is recomputed."""
        step = self.step
        return step.before if recompute and step.before is not None else step.now

    def scales_of(self, scales: Scales) -> Tensor:
        """fp32 (n,): the values of `scales`."""
        past = scales.past
        return self._buffers["scale"] if past is None else past  # type: ignore[return-value]

    def views(self, slot: int, scales: Scales) -> tuple[Tensor, Tensor]:
        """The encode scale of the slot among `scales`, fp32 (1,), and the bits of its live amax, int32 (1,)."""
        with torch.inference_mode(False):  # an inference tensor could not be written in training
            live = self.amax_history[0, slot : slot + 1].view(torch.int32)
        return self.scales_of(scales)[slot : slot + 1], live

    @torch.no_grad()
    def forget_live(self) -> None:
        """Drop the amaxes of a failed step."""
        self.amax_history[0].zero_()

    @torch.no_grad()
    def forget(self, slots: Sequence[int]) -> None:
        """Make slots new."""
        for slot in slots:
            self.amax_history[:, slot].zero_()
            self.scale[slot] = 1
        self._note_write()
        self._new = None

    @torch.no_grad()
    def drop_nonfinite(self) -> None:
        """Before a reduction: keep live amaxes that are not finite from other ranks, if histories skip them."""
        if self.history.skip_nonfinite_amax:
            self.amax_history[0].copy_(history.drop_nonfinite(self.amax_history[0], self.events))

    def roll(self) -> None:
        """End a step: the live row becomes the newest entry and scales follow. Slots without an amax stay."""
        self.end_step(history.roll(self.amax_history, self.scale, self.largest, self.history, self.events), slice(None))

    def end_step(self, before: Tensor, place: slice) -> None:
        """The buffers have rolled; `before[place]` (n,) are the scales before."""
        step = self.step
        step.now.rolled = before, place
        step.before, step.now, step.deferred, step.is_first = step.now, Scales(), False, False
        scale: Any = self._buffers["scale"]
        step.version = 0 if scale.is_inference() else scale._version  # as `_note_write`, in less host time

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Tensor],
        prefix: str,
        metadata: dict[str, object],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Without this state a checkpoint changes nothing here. If it has weights, the module made all slots new."""
        key = f"{prefix}amax_history"
        saved = state_dict.get(key)
        if saved is not None and saved.dim() == 2 and saved.shape != self.amax_history.shape:
            state_dict[key] = history.resized(saved, self.amax_history.shape[0])
        self._new, self.step.is_first = None, self.step.is_first and saved is None
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, [], unexpected, errors)
        with torch.no_grad():  # a checkpoint in fp16 holds infinite scales: these slots start anew
            self.scale, self.amax_history = self.scale.float(), self.amax_history.float()
            lost = ~(torch.isfinite(self.scale) & (self.scale > 0))
            self.scale.masked_fill_(lost, 1.0)
            self.amax_history.masked_fill_(lost, 0.0)
        self._note_write()
        if self.events.is_meta and not self.scale.is_meta:  # assign=True gave the state its memory
            self.events = torch.zeros_like(self.events, device=self.scale.device)


STATES: Numbered[DelayedState] = Numbered()


def state_of(number: str) -> DelayedState:
    """The state of that number. Raises UserError if its module is gone."""
    state = STATES.get(number)
    if state is None:
        raise UserError("a delayed-scaling slot outlived its module; build the plan anew by calling the module")
    return state
