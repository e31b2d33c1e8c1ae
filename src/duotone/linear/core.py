"""The linear core: the one forward and the one backward that order quantize, communicate and multiply.

    fprop  y  = x.row  w.row^T      (M, K) (N, K) -> (M, N)
    dgrad  dx = dy.row w.col^T      (M, N) (K, N) -> (M, K)
    wgrad  dw = dy.col x.col^T      (N, M) (K, M) -> (N, K)

Every operand is a plane with its contraction last, in the format that the plan names.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from duotone.linear.plan import LinearPlan
from duotone.linear.plane_source import Operand
from duotone.linear.sink import GRADIENT, Sink
from duotone.pipeline.stage import Kept, Stage
from duotone.tensor.context import QuantizeContext
from duotone.tensor.plane import Plane, Planes


@dataclass(frozen=True, eq=False)
class LinearStage(Stage):
    """x (*lead, K), weight (N, K), bias (N,) or None, seed int64 (1,) or None -> y (*lead, N) in x's dtype.

    `weight_from` says where the planes of the weight come from, `sink` where its gradient goes. `seed` is needed where
    the plan rounds stochastically.
    """

    plan: LinearPlan
    weight_from: Operand
    sink: Sink = GRADIENT
    arity = (3,)

    @staticmethod
    def of(plan: LinearPlan) -> "LinearStage":
        return LinearStage(plan, plan.weight_from)

    @property
    def rolls_forward_alone(self) -> bool:
        return self.plan.rolls_forward_alone

    @property
    def refusal(self) -> str:
        if self.sink is not GRADIENT:
            return "its weight gradients do not go to autograd (fuse_wgrad_accumulation or delay_wgrad_compute)"
        return self.plan.refusal

    @property
    def reads(self) -> tuple[bool, ...]:
        return self.plan.weight_grad, self.plan.input_grad, False, False

    def replay(self, x: Any, operands: Sequence[Any], kept: Kept | None) -> tuple[Tensor, ...]:
        return (F.linear(x, operands[0], operands[1]),)

    def forward(self, x: Tensor, *operands: Any) -> tuple[Any, ...]:
        flat = as_matrix(x)
        return self.multiply(flat, self.encode_input(flat, operands[2]), x, *operands)

    def encode_input(self, x: Tensor, seed: Tensor | None) -> Planes:
        """The planes of x (M, K) that forward multiplies and backward keeps."""
        plan = self.plan
        return plan.input_from.planes(x, plan.input, plan.input_usage, self.input_context(seed))

    def encode_produced(self, made: Any, seed: Tensor | None) -> Planes | None:
        """As `encode_input` of a matrix that kernels make on the way; None where it has to be there first."""
        plan = self.plan
        return plan.input.encode_produced(made, plan.input_usage, self.input_context(seed))

    def input_context(self, seed: Tensor | None) -> QuantizeContext:
        return self.plan.input_context.with_seed(self.plan.streams(seed)[0])

    def multiply(
        self, flat: Any, x_planes: Planes, like: Tensor, weight: Tensor, bias: Tensor | None, seed: Tensor | None
    ) -> tuple[Tensor, Kept]:
        """The output, with the leading dimensions of `like`, and what backward needs, from the planes of the input.

        `flat` is the input (M, K), which only a plan that goes back to the original looks at.
        """
        plan, layout = self.plan, self.plan.layout
        context = plan.weight_context.with_seed(plan.streams(seed)[1])
        w_planes = self.weight_from.planes(weight, plan.weight, plan.weight_usage, context)
        self.sink.begin()
        assert x_planes.rowwise is not None and w_planes.rowwise is not None
        row = layout.gather_input(x_planes.rowwise, 0)
        y = plan.fprop.rule.run(row, w_planes.rowwise, like.dtype, layout.bias_in_product(bias))
        y = layout.reduce_output(y, bias)
        kept_x = kept_w = None
        if plan.weight_grad:
            kept_x = plan.input_source.keep(flat, x_planes, plan.input, self.input_context(seed))
        if plan.input_grad:
            kept_w = plan.source.keep(weight, w_planes, plan.weight, context)
        # The seed is no saved tensor: a recomputed forward must not replace that of the first one.
        return with_lead(y, like), (kept_x, kept_w, (seed,))

    def backward(self, dy: Tensor, kept: Kept, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        flat = as_matrix(dy)
        return self.differentiate(flat, self.encode_gradient(flat, kept), dy, kept, needs)

    def encode_gradient(self, dy: Tensor, kept: Kept) -> Planes:
        """The planes of dy (M, N) that backward multiplies."""
        plan = self.plan
        context = plan.grad_context.with_seed(plan.streams(kept[2][0])[2])
        return plan.gradient_from.planes(dy, plan.grad_output, plan.grad_usage, context)

    def encode_produced_gradient(self, made: Any, kept: Kept) -> Planes | None:
        """As `encode_gradient`, likewise."""
        plan = self.plan
        context = plan.grad_context.with_seed(plan.streams(kept[2][0])[2])
        return plan.grad_output.encode_produced(made, plan.grad_usage, context)

    def differentiate(
        self, flat: Any, dy_planes: Planes, like: Tensor, kept: Kept, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        """dx with the leading dimensions of `like`, dw, db and None for the seed, from the planes of dy.

        `flat` is dy (M, N), which only the gradient of a bias looks at.
        """
        plan, layout = self.plan, self.plan.layout
        kept_x, kept_w, _ = kept
        row, col = dy_planes
        del dy_planes  # each plane goes as soon as its product is done
        dx = dw = db = None
        if kept_w is not None and row is not None:
            row = layout.gather_grad(row, 0)
            dx = plan.dgrad.rule.run(row, plan.source.restore(kept_w.there(), like.dtype), like.dtype)
            dx = with_lead(layout.reduce_grad_input(dx), like)
        del row
        if kept_x is not None and col is not None and needs[1]:
            dw = self.sink.take(WeightGradient(self, col, kept), like)
        if needs[2]:
            db = layout.reduce_grad_bias(flat.sum(0))
        return dx, dw, db, None


@dataclass(frozen=True, eq=False)
class Calibrating(LinearStage):
    """A linear that also records the amaxes which delayed scaling under the plan `recording` would."""

    recording: LinearPlan | None = None

    def forward(self, x: Tensor, *operands: Any) -> tuple[Any, ...]:
        assert self.recording is not None
        record(self.recording.input_context, x)
        record(self.recording.weight_context, operands[0])
        return super().forward(x, *operands)


@dataclass(eq=False)
class WeightGradient:
    """The product dw = dy^T x, (N, K), not yet computed."""

    stage: LinearStage
    dy: Plane
    kept: Kept

    def compute(self, dtype: Any, operand_dtype: Any) -> Tensor:
        return self.stage.plan.wgrad.rule.run(*self._operands(operand_dtype), dtype)

    def compute_into(self, out: Tensor, adds: bool, operand_dtype: Any) -> None:
        self.stage.plan.wgrad.rule.run_into(*self._operands(operand_dtype), out, adds)

    def _operands(self, dtype: Any) -> tuple[Plane, Plane]:
        plan, layout = self.stage.plan, self.stage.plan.layout
        source, kept_x = plan.input_source, self.kept[0]
        col = layout.gather_grad(self.dy, 1)
        return col, source.restore(layout.gather_input(kept_x.there(), source.token_dim), dtype)


def record(context: QuantizeContext, x: Tensor) -> None:
    """Record the amax of `x` in the delayed slots of a context."""
    for slot in context.slots:
        if slot is not None and x.numel():
            slot.scale_for(x.detach().reshape(-1, x.shape[-1]))


def as_matrix(x: Tensor) -> Tensor:
    """(*lead, K) -> (M, K), also where it is empty."""
    if x.dim() == 2:
        return x
    return x.reshape(-1, x.shape[-1]) if x.numel() else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def with_lead(y: Tensor, like: Tensor) -> Tensor:
    """(M, N) with the leading dimensions of `like`; sequence parallelism gathers or scatters the first of them."""
    if like.dim() == 2:
        return y
    lead = like.shape[:-1]
    if y.shape[0] == lead.numel():
        return y.view(*lead, y.shape[-1])
    return y.view(-1, *lead[1:], y.shape[-1])
