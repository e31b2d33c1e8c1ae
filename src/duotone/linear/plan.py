"""The plan of a linear: recipe, roles, gradients, parallel layout and device, resolved once into three GEMMs.

Execution reads no mode; it follows the plan. A plan is a frozen, hashable value, and its rows say which kernel runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from duotone.formats import IDENTITY
from duotone.linear.gemm_plan import GemmPlan
from duotone.linear.layout import WHOLE, Layout
from duotone.linear.operand_plan import OperandPlan
from duotone.recipes.roles import TENSOR_TYPES
from duotone.state.amax_mode import AmaxMode
from duotone.tensor.quantizer import Quantizer


@dataclass(frozen=True)
class LinearPlan:
    """What forward and backward follow: three operands, three GEMMs, and the quantizers of the boundary slots."""

    input: OperandPlan
    weight: OperandPlan
    gradient: OperandPlan
    """That of the output; backward encodes it."""

    output: Quantizer
    grad_input: Quantizer
    layout: Layout
    fprop: GemmPlan
    dgrad: GemmPlan
    wgrad: GemmPlan
    seeds: int
    """Stochastic quantizes of one forward and backward: how far the module's seed advances."""

    rolls_forward_alone: bool = False
    """Whether delayed states of forward roll at the end of backward because the gradient is not delayed itself."""

    @property
    def input_grad(self) -> bool:
        """Whether backward owes the gradient of the input."""
        return self.weight.is_kept

    @property
    def weight_grad(self) -> bool:
        """Whether backward owes the gradient of the weight."""
        return self.input.is_kept

    @property
    def operands(self) -> dict[str, OperandPlan]:
        """By tensor type."""
        return dict(zip(TENSOR_TYPES, (self.input, self.weight, self.gradient), strict=True))

    @property
    def gemms(self) -> Iterator[GemmPlan]:
        return iter((self.fprop, self.dgrad, self.wgrad))

    @property
    def refusal(self) -> str:
        """Why second derivatives cannot go through these GEMMs, or ""."""
        if any(fmt != IDENTITY for gemm in self.gemms for fmt in (gemm.a, gemm.b)):
            return "its operands are quantized"
        return "" if self.layout == WHOLE else "it is spread over ranks"

    @property
    def is_delayed(self) -> bool:
        return any(any(operand.quantizer.delayed) for operand in self.operands.values())

    def with_slots(self, forward: str, backward: str, group: str, mode: AmaxMode, member: int = 0) -> "LinearPlan":
        """The plan for the `member`-th linear of a module whose delayed states have these numbers."""
        return replace(
            self,
            input=self.input.with_slots(forward, member, 0, FORWARD_SLOTS, group, mode),
            weight=self.weight.with_slots(forward, member, 2, FORWARD_SLOTS, group, mode),
            gradient=self.gradient.with_slots(backward, member, 0, BACKWARD_SLOTS, group, AmaxMode.RECORD, True),
            rolls_forward_alone=not any(self.gradient.quantizer.delayed),
        )

    def with_traced_slots(self, name: str, member: int) -> "LinearPlan":
        """The plan of the `member`-th linear for a graph that equal modules share, under its name there."""
        operands = {
            field: getattr(self, field).with_traced_slots(name, member, field)
            for field in ("input", "weight", "gradient")
        }
        return replace(self, **operands, rolls_forward_alone=not any(self.gradient.quantizer.delayed))

    def of_module(self, handle: Tensor) -> "LinearPlan":
        """In a trace: the plan with the delayed slots of the module that `handle` names."""
        return replace(
            self,
            input=self.input.of_module(handle),
            weight=self.weight.of_module(handle),
            gradient=self.gradient.of_module(handle),
        )


FORWARD_SLOTS, BACKWARD_SLOTS = 4, 2
"""Delayed-scaling slots of a linear: two directions of input and weight, and of grad_output."""
