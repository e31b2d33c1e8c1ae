"""Hand-over: a norm or an activation gives the linear behind it planes, and takes its place in one fused stage.

The values that are encoded are those that the producer would have written, rounded to its dtype, so results are the
same bits; what is saved is the tensor in high precision between the two. GELU on CUDA is the exception: made on the way
of a cast, it may round a value next to a tie the other way (`kernels/activations.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from duotone.linear.core import LinearStage, as_matrix
from duotone.linear.operand import ENCODED
from duotone.linear.stage import Kept, Stage
from duotone.ops.activation import ActivationStage
from duotone.ops.rules import Stages, register_rule, replace_pairs


class Pair(Stage):
    """Two stages as one."""

    first: Stage
    second: Stage

    @property
    def basics(self) -> tuple[Stage, ...]:
        return self.first, self.second

    @property
    def arity(self) -> tuple[int, ...]:  # type: ignore[override]
        return (*self.first.arity, *self.second.arity)

    @property
    def rolls_forward_alone(self) -> bool:
        return self.second.rolls_forward_alone or self.first.rolls_forward_alone


@dataclass(frozen=True, eq=False)
class CastForward(Pair):
    """A producer whose output only exists as the planes that the linear multiplies and keeps."""

    first: Any
    second: LinearStage

    def run(self, x: Any, operands: Sequence[Any]) -> tuple[Any, Sequence[Kept], Sequence[Tensor]]:
        *of_producer, weight, bias, seed = operands
        made = self.first.produced(x)
        planes = None if made is None else self.second.encode_produced(made, seed)
        if planes is not None:
            y, kept_here = self.second.multiply(None, planes, x, weight, bias, seed)
            return y, (self.first.keep(x), kept_here), ()
        values, kept = self.first.forward(x, *of_producer)
        planes = self.second.encode_input(as_matrix(values), seed)
        del values
        y, kept_here = self.second.multiply(None, planes, x, weight, bias, seed)
        return y, (kept, kept_here), ()


@dataclass(frozen=True, eq=False)
class CastBackward(Pair):
    """The gradient through an activation, cast at once for the linear before it."""

    first: LinearStage
    second: ActivationStage

    def run_backward(
        self, dy: Any, kept: Sequence[Kept], needs: tuple[bool, ...], extra: Sequence[Tensor]
    ) -> tuple[Any, Sequence[Tensor | None]]:
        made = None if needs[1] else self.second.activation.produced_gradient(dy, kept[1][0])
        planes = None if made is None else self.first.encode_produced_gradient(made, kept[0])
        if planes is not None:
            del dy, made  # the gradient that came in goes before the products need memory
            dx, *found = self.first.differentiate(None, planes, kept[1][0], kept[0], (True, *needs))
            return dx, found
        (gradient,) = self.second.backward(dy, kept[1], (True,))
        assert gradient is not None
        flat = as_matrix(gradient)
        planes = self.first.encode_gradient(flat, kept[0])
        dx, *found = self.first.differentiate(flat, planes, gradient, kept[0], (True, *needs))
        return dx, found


def cast_forward(stages: Stages) -> Stages:
    """Producers before a linear that multiplies and keeps planes of its own."""
    return replace_pairs(stages, _hand_over)


def cast_backward(stages: Stages) -> Stages:
    """Activations behind a linear whose gradient is quantized."""
    return replace_pairs(stages, _hand_back)


def _hand_over(first: Stage, second: Stage) -> Stage | None:
    if not getattr(first, "hands_over", False) or type(second) is not LinearStage:
        return None
    plan = second.plan
    if plan.input_from is not ENCODED:
        return None
    if plan.weight_grad and plan.input_source.keeps_original:
        return None
    return CastForward(first, second)


def _hand_back(first: Stage, second: Stage) -> Stage | None:
    if type(first) is not LinearStage or not isinstance(second, ActivationStage) or not second.keeps:
        return None
    plan = first.plan
    return CastBackward(first, second) if plan.gradient_from is ENCODED else None


register_rule(cast_forward, "forward")
register_rule(cast_backward, "backward")
