"""The linear core: the one forward and the one backward that order quantize, communicate and multiply.

    fprop  y  = x.row  w.row^T      (M, K) (N, K) -> (M, N)
    dgrad  dx = dy.row w.col^T      (M, N) (K, N) -> (M, K)
    wgrad  dw = dy.col x.col^T      (N, M) (K, M) -> (N, K)

Every operand is a plane with its contraction last, in the format that the plan names.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.formats import IDENTITY
from duotone.linear.operand_plan import Original
from duotone.linear.plan import LinearPlan
from duotone.linear.plane_source import in_dtype_of
from duotone.linear.sink import GRADIENT, Sink
from duotone.pipeline.stage import Gradients, Needs, Saved, Stage
from duotone.tensor.context import QuantizeContext, Slot
from duotone.tensor.plane import Plane, Planes

Item = TypeVar("Item")
Operands = tuple[Item | None, Item | None, Sequence[Item], Sequence[Item]]
"""Row counts, seed, weights and biases, or anything that exists once for each of them."""


@dataclass(frozen=True, eq=False)
class LinearStage(Stage):
    """x (*lead, K), weight (N, K), bias (N,) or None, seed int64 (1,) or None -> y (*lead, N) in x's dtype.

    `sink` says where the gradient of the weight goes. A plan that rounds stochastically needs the seed.
    No field may have an object as its default: torch 2.11 refuses such stages in a trace.
    """

    plan: LinearPlan
    sink: Sink
    name: str = ""
    """The name of the stage in graphs: that of its template, and a digest of what decides its results."""
    row_part: str = ""
    has_owner: bool = False
    arity = (3,)

    @property
    def linears(self) -> tuple["LinearStage", ...]:
        """The stage itself: fused stages have several."""
        return (self,)

    @property
    def rolls_forward_alone(self) -> bool:
        return self.plan.rolls_forward_alone

    @property
    def is_bindable(self) -> bool:  # type: ignore[override]
        return type(self) is LinearStage and self.sink is GRADIENT and self.plan.is_bindable

    @property
    def waits(self) -> bool:  # type: ignore[override]
        return self.sink.waits

    @property
    def stores(self) -> bool:  # type: ignore[override]
        return self.sink is not GRADIENT

    @property
    def slots(self) -> tuple[Slot, ...]:  # type: ignore[override]
        return self.plan.input.slots + self.plan.weight.slots

    @property
    def gradient_slots(self) -> tuple[Slot, ...]:  # type: ignore[override]
        return self.plan.gradient.slots

    def opened(self, slots: Mapping[Slot, Slot]) -> "LinearStage":
        return LinearStage(self.plan.opened(slots), self.sink, self.name) if slots else self

    @property
    def refusal(self) -> str:  # type: ignore[override]
        if self.stores:
            return "its weight gradients do not go to autograd (fuse_wgrad_accumulation or delay_wgrad_compute)"
        return self.plan.refusal

    @property
    def reads(self) -> tuple[bool, ...]:  # type: ignore[override]
        return self.plan.weight_grad, self.plan.input_grad, False, False

    def in_rows(self, part: str) -> "LinearStage":
        """In a trace: the stage of one module, under another name in rows."""
        return LinearStage(self.plan, self.sink, self.name, part, True)

    def named(self, operands: Sequence[Item]) -> Operands[Item]:
        """Row counts, seed, weights and biases, or the same of anything that exists once for each operand."""
        weight, bias, seed = operands
        return None, seed, (weight,), (bias,)

    def ordered(self, operands: Operands[Item]) -> tuple[Item | None, ...]:
        """The inverse of `named`."""
        _, seed, weights, biases = operands
        return *weights, *biases, seed

    def replay(self, x: Tensor, operands: Sequence[Tensor], saved: Saved | None) -> tuple[Tensor, ...]:
        weight, bias, _ = operands
        return (F.linear(x, weight, bias),)

    def run(self, x: Tensor, operands: Sequence[Any]) -> tuple[Tensor, Sequence[Saved], Sequence[Tensor]]:
        weight, bias, seed = operands
        flat = x if x.dim() == 2 else as_matrix(x)
        y, saved = self.multiply(flat, self.plan.input.encode(flat, seed), x, weight, bias, seed)
        return y, (saved,), ()

    def forward(self, x: Tensor, *operands: Tensor) -> tuple[Tensor, Saved]:
        y, (saved,), _ = self.run(x, operands)
        return y, saved

    def multiply(
        self, flat: Original, x_planes: Planes, like: Tensor, weight: Tensor, bias: Tensor | None, seed: Tensor | None
    ) -> tuple[Tensor, Saved]:
        """The output with the leading dimensions of `like`, and what backward needs, from the planes of the input.

        `flat` is the input (M, K), for plans whose backward reads it.
        """
        plan, layout = self.plan, self.plan.layout
        w_planes = plan.weight.encode(weight, seed)
        if self.sink is not GRADIENT:
            self.sink.begin()
        assert x_planes.rowwise is not None and w_planes.rowwise is not None
        row, added = x_planes.rowwise, bias
        if layout.exchanges:
            row, added = layout.gather_input(row, 0), layout.bias_in_product(bias)
        y = plan.fprop.rule.run(row, w_planes.rowwise, like.dtype, added)
        if layout.exchanges:
            y = layout.reduce_output(y, bias)
        # The seed is not a saved tensor: a recomputed forward must not replace that of the first one.
        saved = plan.input.keep(flat, x_planes, seed), plan.weight.keep(weight, w_planes, seed), (seed,)
        return y if like.dim() == 2 else with_lead(y, like), saved

    def backward(self, dy: Tensor, saved: Saved, needs: Needs, *extra: Tensor) -> Gradients:
        flat = dy if dy.dim() == 2 else as_matrix(dy)
        return self.differentiate(flat, self.plan.gradient.encode(flat, saved[2][0]), dy, saved, needs)

    def differentiate(
        self, flat: Tensor | None, dy_planes: Planes, like: Tensor, saved: Saved, needs: Needs
    ) -> Gradients:
        """dx with the leading dimensions of `like`, dw, db and None for the seed, from the planes of dy.

        `flat` is dy (M, N); only the gradient of a bias needs it. A columnwise plane that dw needs and `dy_planes` lack
        is the transpose of the rowwise one, as all ranks have it.
        """
        plan, layout = self.plan, self.plan.layout
        _, needs_weight, needs_bias, _ = needs
        saved_x, saved_w, _ = saved
        row, col = dy_planes
        del dy_planes  # the memory of each plane is free as soon as its product is done
        dx = dw = db = None
        is_derived, is_whole = saved_x is not None and col is None, False
        if is_derived and row is not None and self.sink.waits:  # a queue holds this rank's rows
            col = row.transposed()
        if layout.exchanges and row is not None and (saved_w is not None or col is None):
            row = layout.gather_grad(row, 0)
        if is_derived and row is not None and col is None:
            col, is_whole = row.transposed(), True
        if saved_w is not None and row is not None:
            w = plan.weight.backward.restore(saved_w.materialize(), like.dtype)
            if w.format is IDENTITY:
                w = in_dtype_of(w, like)
            dx = plan.dgrad.rule.run(row, w, like.dtype)
            del w
            if layout.exchanges:
                dx = layout.reduce_grad_input(dx)
            if like.dim() != 2:
                dx = with_lead(dx, like)
        del row
        if saved_x is not None and col is not None and needs_weight:
            product = WeightGradient(self, col, saved, is_whole)
            dw = product.compute(like.dtype, like.dtype) if self.sink is GRADIENT else self.sink.take(product, like)
        if needs_bias:
            assert flat is not None
            db = layout.reduce_grad_bias(flat.sum(0))
        return dx, dw, db, None


@dataclass(frozen=True, eq=False)
class Calibrating(LinearStage):
    """A linear that also records the amaxes that delayed scaling under the plan `recording` would record."""

    recording: LinearPlan | None = None

    def run(self, x: Tensor, operands: Sequence[Tensor]) -> tuple[Tensor, Sequence[Saved], Sequence[Tensor]]:
        assert self.recording is not None
        record(self.recording.input.context, x)
        record(self.recording.weight.context, operands[0])
        return super().run(x, operands)


@dataclass(eq=False)
class WeightGradient:
    """The product dw = dy^T x, (N, K), not yet computed."""

    stage: LinearStage
    dy: Plane
    saved: Saved
    is_whole: bool = False
    """Whether `dy` already has the rows of all ranks."""

    def compute(self, dtype: torch.dtype, operand_dtype: torch.dtype) -> Tensor:
        return self.stage.plan.wgrad.rule.run(*self._operands(operand_dtype), dtype)

    def compute_into(self, out: Tensor, adds: bool, operand_dtype: torch.dtype) -> None:
        self.stage.plan.wgrad.rule.run_into(*self._operands(operand_dtype), out, adds)

    def _operands(self, dtype: torch.dtype) -> tuple[Plane, Plane]:
        plan, layout = self.stage.plan, self.stage.plan.layout
        backward, saved = plan.input.backward, self.saved[0].materialize()
        col = self.dy
        if layout.exchanges:
            saved = layout.gather_input(saved, backward.token_dim)
            col = col if self.is_whole else layout.gather_grad(col, 1)
        return col, backward.restore(saved, dtype)


def record(context: QuantizeContext, x: Tensor) -> None:
    """Record the amax of `x` in the delayed slots of a context."""
    for slot in context.slots:
        if slot is not None and x.numel():
            slot.scale_for(x.detach().reshape(-1, x.shape[-1]))


def as_matrix(x: Tensor) -> Tensor:
    """(*lead, K) -> (M, K), also if it is empty."""
    if x.dim() == 2:
        return x
    return x.reshape(-1, x.shape[-1]) if x.numel() else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def with_lead(y: Tensor, like: Tensor) -> Tensor:
    """(M, N) with the leading dimensions of `like`; sequence parallelism gathers or scatters the first of them."""
    if like.dim() == 2:
        return y
    lead = like.shape[:-1]
    is_same = y.shape[0] == math.prod(lead)  # Size.numel() would make constants of symbols
    # No view to autograd, which forbids in-place operations on views that a custom function returns.
    return torch.ops.aten._unsafe_view.default(y, (*(lead if is_same else (-1, *lead[1:])), y.shape[-1]))
