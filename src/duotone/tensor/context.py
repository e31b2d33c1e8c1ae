"""QuantizeContext: the arguments of a quantize besides the tensor. Callers pass it, and no quantizer keeps it."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duotone.comm import ShardContext

Amaxes = tuple[Tensor | None, Tensor | None]
"""Of the rowwise and the columnwise plane, fp32. None for one that is not known, or not needed."""
NO_AMAXES = None, None


class Slot:
    """One delayed scale, and the place that records its amax."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def scale_now(self, x: Tensor) -> Tensor | None:
        """A copy of the scale that the last encode, of x, had, fp32 (1,). None where the slot itself keeps it."""
        return None

    def serves(self, other: "Slot | None") -> bool:
        """Whether a graph that was traced with this slot of a tensor may run with another slot."""
        return self == other

    is_new = False
    """Whether the scale follows from the first tensor, which must then exist before the cast."""

    def for_writes(self, by_training: bool) -> "Slot":
        """The slot for a write: one of training follows the history, and the scale fits all other values."""
        return self

    def events(self) -> tuple[int, int]:
        """How many amaxes so far were not finite and did not enter the history, and how many were clamped."""
        return 0, 0

    is_openable = False
    """Whether calls can open it. Those of traces are opened by ops."""

    def open(self) -> "OpenSlot":
        """The slot as one call uses it. The state will roll if the call records."""
        raise NotImplementedError

    def together(self, slots: "Sequence[Slot]") -> "Sequence[Callable[[], Sequence[OpenSlot]]]":
        """What each call calls to open several slots, of which this is the first. It gives them in their order."""
        raise NotImplementedError

    def scale_for(self, x: Tensor) -> Tensor:
        """The scale to encode `x` with, fp32 (1,). Records the amax of `x`."""
        raise NotImplementedError

    def place(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Like `scale_for`, but the cast writes the bits of the amax to the second result, int32 (1,), if any."""
        return self.scale_for(x), None

    def upcoming(self, amax: Tensor) -> Tensor:
        """The scale that the next call takes for a tensor with this amax, fp32 (1,). Records nothing."""
        raise NotImplementedError

    def fit(self, amax: Tensor) -> None:
        """Start anew if the scale clips a tensor with this amax, fp32 (1,), unless histories decide alone."""

    def record(self, amax: Tensor) -> None:
        """Record what a cast of a tensor with this amax, fp32 (1,), records in the mode of the call."""
        raise NotImplementedError

    def place_each(
        self, device: torch.device, count: int, distance: int, amaxes: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Like `place`, for the first of `count` slots, `distance` apart. `amaxes` measures all, fp32 (count,)."""
        raise NotImplementedError


class OpenSlot(Slot):
    """A slot that one call has opened."""

    tensors: Sequence[Tensor | None]
    """What an encode reads and writes of the slot, such as its scale and its live amax."""

    is_steady: bool
    """Whether each call reads and writes it in the same way."""

    key: Hashable
    """What decides how kernels read the scale and write the amax: which of them exist, and where they lie."""


class FixedScale(Slot):
    """A slot with one scale, fp32 (1,). It records nothing."""

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale

    def scale_for(self, x: Tensor) -> Tensor:
        return self.scale


@dataclass(frozen=True)
class QuantizeContext:
    """How to encode one tensor.

    - `shard`: the tensor is one shard of another. Shards agree on the amaxes of scales that span them.
    - `amaxes`: what they have agreed on before, for the rowwise and the columnwise plane.
    - `slots`: delayed scaling of the rowwise and the columnwise plane.
    - `seed`: int64 (1,), for stochastic rounding.
    - `propagate`: elements that are not finite make the products that read them non-finite (see `Format.encode`).
    - `typed`: codes have the dtype of their element if that saves host time, else uint8.
    - `nominal`: the dtype of the tensor that is written, and of the dequantized plane that another plane encodes; None
      means the dtype of the values.
    """

    shard: ShardContext | None = None
    slots: tuple[Slot | None, Slot | None] = (None, None)
    seed: Tensor | None = None
    propagate: bool = True
    nominal: torch.dtype | None = None
    typed: bool = False
    amaxes: Amaxes = NO_AMAXES

    def with_seed(self, seed: Tensor | None) -> "QuantizeContext":
        """This context with a seed, int64 (1,); None leaves it unchanged."""
        if seed is None:
            return self
        return self._but(self.slots, seed)

    def agreed(self, measure: Callable[[int], tuple[Amaxes, Sequence[bool]]]) -> Amaxes:
        """The amaxes under which a shard encodes. Shards agree now on those that span them, unless they are known.

        `measure` gives amaxes along the dimension that is cut, and whether each spans the shards.
        """
        if self.shard is None or any(amax is not None for amax in self.amaxes):
            return self.amaxes
        return self.shard.agree(*measure(self.shard.dim))

    def without_slots(self) -> "QuantizeContext":
        """The context of a copy. Writes to the copy record nothing in the history of the original."""
        return self if self.slots == (None, None) else self._but((None, None), self.seed)

    def _but(self, slots: tuple[Slot | None, Slot | None], seed: Tensor | None) -> "QuantizeContext":
        options = self.propagate, self.nominal, self.typed
        return QuantizeContext(self.shard, slots, seed, *options)  # much faster than `replace`


LOCAL = QuantizeContext()
"""A whole tensor on one device, rounded to nearest, scaled by itself."""
