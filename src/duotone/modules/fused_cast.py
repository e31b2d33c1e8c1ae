"""Fused casts: the cast kernel of a linear also computes its input (a norm or an activation) or its gradient.

The encoded values are those that the producer would have written, rounded to its dtype. So results have the same bits,
without the memory of the high-precision tensor between the two. GELU and the norms on CUDA are exceptions: a cast
kernel may round their values the other way if they are next to a tie (`kernels/activations.py`, `norms.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

from torch import Tensor

from duotone.linear.core import LinearStage, as_matrix
from duotone.linear.operand_plan import COLUMNWISE, USE_SUPPLIED, OperandPlan, columnwise
from duotone.linear.plane_source import ENCODE_NOW
from duotone.modules.activation import ActivationStage
from duotone.modules.basic import ProducerStage
from duotone.modules.norm import NormStage
from duotone.pipeline.rewrites import register_rule, replace_pairs
from duotone.pipeline.stage import Gradients, Needs, Saved, Stage
from duotone.tensor.context import Slot
from duotone.tensor.plane import Plane, Usage


class Pair(Stage):
    """Two stages as one."""

    first: Stage
    second: Stage

    @property
    def basics(self) -> tuple[Stage, ...]:
        return *self.first.basics, *self.second.basics

    @property
    def arity(self) -> tuple[int, ...]:
        return (*self.first.arity, *self.second.arity)

    @property
    def is_bindable(self) -> bool:  # type: ignore[override]
        return self.first.is_bindable and self.second.is_bindable

    @property
    def slots(self) -> tuple[Slot, ...]:  # type: ignore[override]
        return self.first.slots + self.second.slots

    @property
    def gradient_slots(self) -> tuple[Slot, ...]:  # type: ignore[override]
        return self.first.gradient_slots + self.second.gradient_slots

    def opened(self, slots: Mapping[Slot, Slot]) -> "Pair":
        parts = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return replace(self, **{name: part and part.opened(slots) for name, part in parts.items()})  # type: ignore

    @property
    def rolls_forward_alone(self) -> bool:
        return self.second.rolls_forward_alone or self.first.rolls_forward_alone


@dataclass(frozen=True, eq=False)
class CastForward(Pair):
    """A producer whose output exists only as the planes that the linear multiplies and saves."""

    first: ProducerStage
    second: LinearStage
    lean: LinearStage | None = None
    """With `recompute_columnwise`, the linear without the columnwise plane. Backward encodes that plane again, from the
    tensors that the producer saves."""

    def run(self, x: Tensor, operands: Sequence[Tensor]) -> tuple[Tensor, Sequence[Saved], Sequence[Tensor]]:
        *of_producer, weight, bias, seed = operands
        linear = self.lean or self.second
        producer = self.first.fused_producer(x, *of_producer)
        if producer is not None and (planes := linear.plan.input.encode_produced(producer, seed)) is not None:
            saved = self.first.keep(x, *of_producer, *producer.saved)
        else:
            values, saved = self.first.forward(x, *of_producer)
            planes = linear.plan.input.encode(as_matrix(values), seed)
            del values
        original = None
        if self.lean is not None:
            original = linear.plan.input.deferred(partial(_encode_again, self.first), saved, seed)
        y, saved_by_linear = linear.multiply(original, planes, x, weight, bias, seed)
        return y, (saved, saved_by_linear), ()


def _encode_again(
    producer: ProducerStage, operand: OperandPlan, seed: Tensor | None, x: Tensor, *saved: Tensor
) -> Plane:
    """The columnwise plane of a producer's output, computed from the tensors that the producer saves."""
    fused = producer.fused_producer(x, *saved)
    ctx = operand.seeded(seed)
    planes = None if fused is None else operand.quantizer.encode_produced(fused, COLUMNWISE, ctx)
    if planes is None:
        values, _ = producer.forward(x, *saved[: sum(producer.arity)])
        return columnwise(operand, seed, as_matrix(values))
    assert planes.columnwise is not None
    return planes.columnwise


@dataclass(frozen=True, eq=False)
class CastBackward(Pair):
    """The gradient through an activation, cast at once for the linear before it."""

    first: LinearStage
    second: ActivationStage

    def run_backward(
        self, dy: Tensor, saved: Sequence[Saved], needs: Needs, extra: Sequence[Tensor]
    ) -> tuple[Tensor | None, Gradients]:
        operand, of_linear, like = self.first.plan.gradient, saved[0], saved[1][0]
        seed = of_linear[2][0]
        producer = None if needs[1] else self.second.fused_gradient(dy, like)
        planes = None if producer is None else operand.encode_produced(producer, seed)
        flat = None
        if planes is None:
            like = self.second.activation.differentiate(dy, like)
            flat = as_matrix(like)
            planes = operand.encode(flat, seed)
        del dy, producer  # frees the incoming gradient before the products need memory
        dx, *gradients = self.first.differentiate(flat, planes, like, of_linear, (True, *needs))
        return dx, tuple(gradients)


@dataclass(frozen=True, eq=False)
class NormBackward(Pair):
    """The backward of a norm that a cast kernel computed, and of what follows it."""

    first: NormStage
    second: Stage

    def run_backward(
        self, dy: Tensor, saved: Sequence[Saved], needs: Needs, extra: Sequence[Tensor]
    ) -> tuple[Tensor | None, Gradients]:
        count, gradient = sum(self.first.arity), [dy]
        del dy  # popped, so that the second can free it before its products need memory
        dx, of_second = self.second.run_backward(gradient.pop(), saved[1:], needs[count:], extra)
        assert dx is not None
        dx, *of_norm = self.first.backward_of_produced(dx, saved[0], (True, *needs[:count]))
        return dx, (*of_norm, *of_second)


def _casts_output(first: Stage, second: Stage) -> bool:
    """Whether the linear encodes the producer's output, and saves nothing else of it."""
    if not isinstance(first, ProducerStage) or type(second) is not LinearStage:
        return False
    operand = second.plan.input
    keeps_input = operand.is_kept and operand.backward.keeps_original and not operand.backward.takes_producer
    return operand.source is ENCODE_NOW and not keeps_input


def _fuse_forward(first: Stage, second: Stage) -> Stage | None:
    """A producer and the linear that encodes its output and saves nothing else of it."""
    if not _casts_output(first, second):
        return None
    assert isinstance(first, ProducerStage) and isinstance(second, LinearStage)
    plan, operand = second.plan, second.plan.input
    if not (operand.backward.takes_producer and operand.is_kept and first.keeps):
        return CastForward(first, second)
    lean = replace(operand, backward=USE_SUPPLIED, usage=Usage(True, False))
    return CastForward(first, second, replace(second, plan=replace(plan, input=lean)))


def _fuse_norm(first: Stage, second: Stage) -> Stage | None:
    """A norm before a linear whose cast kernel computes it."""
    if not isinstance(first, NormStage) or not first.keeps or not _casts_output(first, second.basics[0]):
        return None
    return NormBackward(first, second)


def _fuse_backward(first: Stage, second: Stage) -> Stage | None:
    """An activation behind a linear whose gradient is quantized."""
    if type(first) is not LinearStage or not isinstance(second, ActivationStage) or not second.keeps:
        return None
    return CastBackward(first, second) if first.plan.gradient.source is ENCODE_NOW else None


cast_forward = partial(replace_pairs, fuse=_fuse_forward)
cast_backward = partial(replace_pairs, fuse=_fuse_backward)
norm_backward = partial(replace_pairs, fuse=_fuse_norm)
register_rule(cast_forward, "forward")
register_rule(cast_backward, "backward")
register_rule(norm_backward, "backward")
