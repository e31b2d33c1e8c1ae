"""The plan of one operand of a linear: its formats, where its planes come from, and what backward gets of it."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from duotone.linear.backward_operand import BACKWARD_OPERANDS, BackwardOperand
from duotone.linear.plane_source import PlaneSource
from duotone.state.amax_mode import AmaxMode
from duotone.state.delayed_slot import DelayedSlot
from duotone.tensor.context import LOCAL, QuantizeContext
from duotone.tensor.plane import Planes, Usage
from duotone.tensor.quantizer import Quantizer


@dataclass(frozen=True)
class OperandPlan:
    """How the input, the weight or the gradient of the output becomes planes."""

    quantizer: Quantizer
    source: PlaneSource
    usage: Usage
    """The planes that are encoded together."""

    context: QuantizeContext = LOCAL
    backward: BackwardOperand = BACKWARD_OPERANDS[None]
    """What is kept for the GEMM of backward that reads the operand."""

    is_kept: bool = False
    """Whether backward owes that GEMM."""

    stream: int | None = None
    """The operand's random numbers are those of the call's seed plus this; None if it rounds to nearest."""

    def seeded(self, seed: Tensor | None) -> QuantizeContext:
        """The context of a call. `seed` is int64 (1,), or None if nothing in the plan is stochastic."""
        if self.stream is None or seed is None:
            return self.context
        return self.context.with_seed(seed + self.stream if self.stream else seed)

    def encode(self, x: Tensor, seed: Tensor | None) -> Planes:
        """The planes of a matrix (M, K) that `usage` names."""
        return self.source.planes(x, self.quantizer, self.usage, self.seeded(seed))

    def encode_produced(self, made: Any, seed: Tensor | None) -> Planes | None:
        """Like `encode`, but the cast kernel also computes the matrix (a fused norm or activation).

        None if no such kernel applies; the caller then computes the matrix and encodes it.
        """
        return self.quantizer.encode_produced(made, self.usage, self.seeded(seed))

    def keep(self, x: Any, planes: Planes, seed: Tensor | None) -> Any:
        """What is saved for backward of the matrix `x` and its planes: a plane, or what makes one later, or None."""
        if not self.is_kept:
            return None
        return self.backward.keep(x, planes, self.quantizer, self.seeded(seed))

    def with_slots(self, state: str, index: int, group: str, mode: AmaxMode, backward: bool = False) -> "OperandPlan":
        """The plan whose delayed directions use the slots `index` (rowwise) and `index + 1` of a state."""
        row, col = self.quantizer.delayed
        slots = (
            DelayedSlot(state, index, group, mode, backward) if row else None,
            DelayedSlot(state, index + 1, group, mode, backward) if col else None,
        )
        return replace(self, context=replace(self.context, slots=slots))

    def from_cache(self, source: PlaneSource, columnwise: bool) -> "OperandPlan":
        """The plan of a weight whose planes a cache keeps; with `columnwise` backward reads one of them."""
        if not self.backward.encodes_again:
            return replace(self, source=source)
        return replace(self, source=source, backward=BACKWARD_OPERANDS[None], usage=Usage(True, columnwise))
