"""Channels: further outputs of ops that later ops of the same Sequential take as further inputs."""

from collections.abc import Sequence
from typing import Any

from duotone.errors import UserError

INPUTS, OUTPUTS = "_input_channels", "_output_channels"
"""Attributes of ops, by index: the channel of an input; (channel, whether the caller gets it too) of an output."""


class Channels:
    """Mixed in before an op with further inputs or outputs. A change takes effect at the next call."""

    extra_inputs = 0
    """How many further inputs a call takes."""

    extra_outputs = 0
    """How many further outputs a call gives."""

    def set_extra_input_channel(self, index: int, channel: str | None) -> None:
        """Take a further input from the op that gives `channel`, instead of from the caller; None: from the caller."""
        _bind(self, INPUTS, self.extra_inputs, index, channel, channel)

    def set_extra_output_channel(self, index: int, channel: str | None, *, output_to_caller: bool = True) -> None:
        """Give a further output the name `channel`; the caller gets it too unless `output_to_caller` is False."""
        _bind(self, OUTPUTS, self.extra_outputs, index, channel, (channel, output_to_caller))


def _bind(op: object, kind: str, count: int, index: int, channel: str | None, value: object) -> None:
    what = {INPUTS: "inputs", OUTPUTS: "outputs"}[kind]
    if not isinstance(index, int) or not 0 <= index < count:
        raise UserError(f"{type(op).__name__} has {count} further {what}; got the index {index!r}")
    if channel is not None and (not isinstance(channel, str) or not channel):
        raise UserError(f"a channel is a name, or None for the caller; got {channel!r}")
    others = {place: one for place, one in bound(op, kind).items() if place != index}
    op.__dict__[kind] = others if channel is None else {**others, index: value}


def bound(op: object, kind: str) -> dict[int, Any]:
    """The channels of an op of one kind, by index."""
    return op.__dict__.get(kind) or {}


def public_inputs(ops: Sequence[object]) -> int:
    """How many further inputs of ops the caller gives."""
    every = sum([getattr(op, "extra_inputs", 0) for op in ops])
    return every - sum([len(bound(op, INPUTS)) for op in ops]) if every else 0


def are_used(ops: Sequence[object]) -> bool:
    """Whether any op has a channel."""
    return any([INPUTS in op.__dict__ or OUTPUTS in op.__dict__ for op in ops])


def check_channels(ops: Sequence[object]) -> None:
    """UserError unless each channel that an op takes is given once, by an op before it."""
    places: dict[str, list[int]] = {}
    for i, op in enumerate(ops):
        for name, _ in bound(op, OUTPUTS).values():
            places.setdefault(name, []).append(i)
    for name, givers in places.items():
        if len(givers) > 1:
            both = " and ".join(f"{type(ops[i]).__name__} at {i}" for i in givers)
            raise UserError(f"the channel {name!r} is given by {both}; give each a name of its own")
    for i, op in enumerate(ops):
        for name in bound(op, INPUTS).values():
            taker = f"{type(op).__name__} at {i} takes the channel {name!r}"
            if name not in places:
                allowed = f"channels are {', '.join(map(repr, places))}" if places else "no op gives a channel"
                raise UserError(f"{taker}, which no op gives; {allowed}")
            if places[name][0] >= i:
                raise UserError(f"{taker}, which the op at {places[name][0]} gives later; put that one before it")


class Routing:
    """The further inputs and outputs of one call, and the values in its channels."""

    def __init__(self, extra: Sequence[object], has_channels: bool) -> None:
        # torch 2.11 traces no bool() of a tuple.
        self.has_channels, self.has_inputs = has_channels, has_channels or len(extra) > 0
        self.unrouted = iter(extra)
        self.channels: dict[str, object] = {}
        self.outputs: list[object] = []

    def inputs(self, ops: Sequence[object]) -> Sequence[object]:
        """The further inputs of ops, in order."""
        inputs: list[object] = []
        for op in ops if self.has_inputs else ():
            names = bound(op, INPUTS)
            for i in range(getattr(op, "extra_inputs", 0)):
                inputs.append(self.channels[names[i]] if i in names else next(self.unrouted))
        return inputs

    def take(self, ops: Sequence[object], outputs: Sequence[object]) -> None:
        """Put the further outputs of ops into channels or among the outputs for the caller."""
        remaining = iter(outputs)
        for op in ops if self.has_channels else ():
            names = bound(op, OUTPUTS)
            for i in range(getattr(op, "extra_outputs", 0)):
                value = next(remaining)
                name, to_caller = names.get(i, ("", True))
                if name:
                    self.channels[name] = value
                if to_caller:
                    self.outputs.append(value)
        self.outputs += remaining
