"""Hand-over: a norm or an activation gives the linear behind it planes, and takes its place in one fused stage.

The values that are encoded are those that the producer would have written, rounded to its dtype, so results are the
same bits; what is saved is the tensor in high precision between the two. GELU and the norms on CUDA are the exception:
made on the way of a cast, they may round a value next to a tie the other way (`kernels/activations.py`, `norms.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from duotone.linear.backward_operand import COLUMNWISE, REENCODE_FROM_PRODUCER, USE_SUPPLIED, columnwise
from duotone.linear.core import LinearStage, as_matrix
from duotone.linear.plane_source import ENCODE_NOW
from duotone.ops.activation import ActivationStage
from duotone.ops.norm import NormStage
from duotone.pipeline.rewrites import Stages, register_rule, replace_pairs
from duotone.pipeline.stage import Kept, Stage
from duotone.tensor.context import QuantizeContext
from duotone.tensor.plane import Plane, Usage
from duotone.tensor.quantizer import Quantizer
from duotone.tensor.saving import DeferredPlane


class Pair(Stage):
    """Two stages as one."""

    first: Stage
    second: Stage

    @property
    def basics(self) -> tuple[Stage, ...]:
        return *self.first.basics, *self.second.basics

    @property
    def arity(self) -> tuple[int, ...]:  # type: ignore[override]
        return (*self.first.arity, *self.second.arity)

    @property
    def rolls_forward_alone(self) -> bool:
        return self.second.rolls_forward_alone or self.first.rolls_forward_alone


@dataclass(frozen=True, eq=False)
class CastForward(Pair):
    """A producer whose output only exists as the planes that the linear multiplies and keeps.

    `first.produced(x, *operands)` is that output as something that casts make on the way, or None; once it is encoded,
    `first.keep(x, *operands, *made.saved)` is what its backward needs.
    """

    first: Any
    second: LinearStage

    @property
    def taker(self) -> LinearStage:
        """The linear as it runs here."""
        return self.second

    def original(self, kept: Kept, seed: Tensor | None) -> Any:
        """What the linear may keep in the place of its input."""
        return None

    def run(self, x: Any, operands: Sequence[Any]) -> tuple[Any, Sequence[Kept], Sequence[Tensor]]:
        *of_producer, weight, bias, seed = operands
        taker, made = self.taker, self.first.produced(x, *of_producer)
        if made is not None and (planes := taker.plan.input.encode_produced(made, seed)) is not None:
            kept = self.first.keep(x, *of_producer, *made.saved)
        else:
            values, kept = self.first.forward(x, *of_producer)
            planes = taker.plan.input.encode(as_matrix(values), seed)
            del values
        y, kept_here = taker.multiply(self.original(kept, seed), planes, x, weight, bias, seed)
        return y, (kept, kept_here), ()


@dataclass(frozen=True, eq=False)
class CastForwardAgain(CastForward):
    """As CastForward under `recompute_columnwise`: backward makes the columnwise plane of what the producer keeps."""

    lean: LinearStage

    @property
    def taker(self) -> LinearStage:
        return self.lean

    def original(self, kept: Kept, seed: Tensor | None) -> Any:
        operand = self.second.plan.input
        return DeferredPlane(partial(_again, self.first, operand.quantizer, operand.seeded(seed).fixed()), kept)


def _again(producer: Any, quantizer: Quantizer, ctx: QuantizeContext, *kept: Any) -> Plane:
    """The columnwise plane of what a producer made of what it keeps: its input, operands, and the rest."""
    made = producer.produced(*kept)
    planes = None if made is None else quantizer.encode_produced(made, COLUMNWISE, ctx)
    if planes is None:
        values, _ = producer.forward(*kept[: 1 + sum(producer.arity)])
        return columnwise(quantizer, ctx, as_matrix(values))
    assert planes.columnwise is not None
    return planes.columnwise


@dataclass(frozen=True, eq=False)
class CastBackward(Pair):
    """The gradient through an activation, cast at once for the linear before it."""

    first: LinearStage
    second: ActivationStage

    def run_backward(
        self, dy: Any, kept: Sequence[Kept], needs: tuple[bool, ...], extra: Sequence[Tensor]
    ) -> tuple[Any, Sequence[Tensor | None]]:
        operand, seed = self.first.plan.gradient, kept[0][2][0]
        made = None if needs[1] else self.second.activation.produced_gradient(dy, kept[1][0])
        planes = None if made is None else operand.encode_produced(made, seed)
        if planes is not None:
            del dy, made  # the gradient that came in goes before the products need memory
            dx, *found = self.first.differentiate(None, planes, kept[1][0], kept[0], (True, *needs))
            return dx, found
        (gradient,) = self.second.backward(dy, kept[1], (True,))
        assert gradient is not None
        flat = as_matrix(gradient)
        planes = operand.encode(flat, seed)
        dx, *found = self.first.differentiate(flat, planes, gradient, kept[0], (True, *needs))
        return dx, found


@dataclass(frozen=True, eq=False)
class NormBackward(Pair):
    """The backward of a norm that was made on the way of a cast, and of what follows it."""

    first: NormStage
    second: Any

    def run_backward(
        self, dy: Any, kept: Sequence[Kept], needs: tuple[bool, ...], extra: Sequence[Tensor]
    ) -> tuple[Any, Sequence[Tensor | None]]:
        own, handed = sum(self.first.arity), [dy]
        del dy  # popped, so that the second can let go of it before its products need memory
        dx, found = self.second.run_backward(handed.pop(), kept[1:], needs[own:], extra)
        dx, *of_norm = self.first.backward_of_produced(dx, kept[0], (True, *needs[:own]))
        return dx, [*of_norm, *found]


def cast_forward(stages: Stages) -> Stages:
    """Producers before a linear that multiplies and keeps planes of its own."""
    return replace_pairs(stages, _hand_over)


def cast_backward(stages: Stages) -> Stages:
    """Activations behind a linear whose gradient is quantized."""
    return replace_pairs(stages, _hand_back)


def norm_backward(stages: Stages) -> Stages:
    """Norms before a linear that takes them over."""
    return replace_pairs(stages, _norm_back)


def _takes_over(first: Stage, second: Stage) -> bool:
    """Whether the linear encodes what the producer makes, and keeps nothing else of it."""
    if not getattr(first, "hands_over", False) or type(second) is not LinearStage:
        return False
    operand = second.plan.input
    return operand.source is ENCODE_NOW and not (operand.is_kept and operand.backward.keeps_original)


def _hand_over(first: Any, second: Any) -> Stage | None:
    if not _takes_over(first, second):
        return None
    plan, operand = second.plan, second.plan.input
    if operand.backward is not REENCODE_FROM_PRODUCER or not (operand.is_kept and first.keeps):
        return CastForward(first, second)
    lean = replace(operand, backward=USE_SUPPLIED, usage=Usage(True, False))
    return CastForwardAgain(first, second, replace(second, plan=replace(plan, input=lean)))


def _norm_back(first: Stage, second: Stage) -> Stage | None:
    if not isinstance(first, NormStage) or not first.keeps or not _takes_over(first, second.basics[0]):
        return None
    return NormBackward(first, second)


def _hand_back(first: Stage, second: Stage) -> Stage | None:
    if type(first) is not LinearStage or not isinstance(second, ActivationStage) or not second.keeps:
        return None
    return CastBackward(first, second) if first.plan.gradient.source is ENCODE_NOW else None


register_rule(cast_forward, "forward")
register_rule(cast_backward, "backward")
register_rule(norm_backward, "backward")
