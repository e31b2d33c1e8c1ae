"""Attention as a stage of a pipeline: it encodes heads, multiplies in blocks, and keeps planes for backward.

The products are two ops of torch, so that a graph has one node for each and the bits of eager code.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from duotone.attention.blockwise import BackwardOperands, Blocks, attend, differentiate
from duotone.attention.head_planes import EncodedHeads, HeadOperand, TileOperand
from duotone.attention.heads import from_heads, to_heads, token_axis
from duotone.attention.ranks import Ranks
from duotone.attention.traced_slot import TracedSlot
from duotone.dispatch import attention
from duotone.dispatch.attention import KERNEL, AttentionProblem, Options, Rounding
from duotone.errors import UserError
from duotone.graph_ops import STATEFUL, define_op
from duotone.modules.traced_stages import number_of, owner_of
from duotone.numbered import Numbered
from duotone.pipeline.stage import Gradients, Needs, Saved, Stage
from duotone.tensor import QuantizedTensor
from duotone.tensor.plane import Plane, Usage, after


class Sizes(NamedTuple):
    """The sizes of heads (batch, groups, heads of a group, tokens, width). A group has one head of keys."""

    batch: int
    groups: int
    heads: int
    queries: int
    keys: int
    width: int
    value_width: int

    @property
    def query(self) -> tuple[int, ...]:
        """The shape of the queries."""
        return self.batch, self.groups, self.heads, self.queries, self.width

    @property
    def key(self) -> tuple[int, ...]:
        """The shape of the keys."""
        return self.batch, self.groups, 1, self.keys, self.width

    @property
    def value(self) -> tuple[int, ...]:
        """The shape of the values."""
        return self.batch, self.groups, 1, self.keys, self.value_width

    @property
    def output(self) -> tuple[int, ...]:
        """The shape of the output and of its gradient."""
        return self.batch, self.groups, self.heads, self.queries, self.value_width


class Call(NamedTuple):
    """What decides the stage of a call besides the recipe: strings and numbers, as constants for graphs."""

    recipe: str
    device: str
    group: str
    mode: str
    layout: str
    causal: bool
    dropout: float
    tracks: bool
    ranks: str
    """The name of the ranks that share the sequence, or ""."""
    groups: int
    """The number of heads of keys and values."""
    scale: float
    """The factor of scores before the softmax."""


STAGES: "Numbered[AttentionStage]" = Numbered()
ROWWISE = Usage(True, False)


@dataclass(frozen=True, eq=False)
class AttentionStage(Stage):
    """query, key and value in a layout of heads, seen bool or None, seed int64 (1,) or None -> heads as one axis.

    Query, key, value and the gradient of the output may be quantized tensors. Then their codes are used directly.

    `out` is how the output is saved for D. A call that does not track gradients keeps nothing.
    """

    name: str
    query: HeadOperand
    key: HeadOperand
    value: HeadOperand
    gradient: HeadOperand
    out: HeadOperand
    weights: TileOperand
    scores_gradient: TileOperand
    is_stochastic: bool
    is_delayed: bool
    problem: AttentionProblem
    """Decides `forward_kernel` and `backward_kernel`, where "" means blocks of keys in plain torch."""

    forward_kernel: str
    backward_kernel: str
    fast: bool
    ranks: Ranks | None
    """The ranks that share the sequence. Keys and values are then those of all ranks."""

    call: Call
    handle: Tensor | None = None
    """In a graph, under delayed scaling: the number of the module, int64 (1,) on the CPU."""

    number: str = ""
    """The number by which ops of a graph find the stage."""

    arity = (4,)
    refusal = "the operands of attention are quantized"

    def __post_init__(self) -> None:
        if not self.number:
            object.__setattr__(self, "number", STAGES.add(self))

    def of_module(self, handle: Tensor) -> "AttentionStage":
        """In a trace: the stage with the delayed slots of the module that `handle` names."""
        operands = {}
        for name in ("query", "key", "value", "gradient", "out", "weights"):
            operand = getattr(self, name)
            delayed = enumerate(operand.quantizer.delayed)
            slots = [TracedSlot(self.number, name, side, handle) if is_used else None for side, is_used in delayed]
            operands[name] = replace(operand, context=replace(operand.context, slots=tuple(slots)))
        return replace(self, handle=handle, **operands)

    @property
    def rolls_forward_alone(self) -> bool:
        operands = self.query, self.key, self.value, self.weights
        forward = [slot for operand in operands for slot in operand.context.slots]
        return any(forward) and not any((*self.scores_gradient.context.slots, *self.gradient.context.slots))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, seed: Tensor | None
    ) -> tuple[Tensor, Saved]:
        batch, heads, queries, width = to_heads(q, self.call.layout).shape
        keys, value_width = k.shape[token_axis(self.call.layout)], v.shape[-1]
        keys *= 1 if self.ranks is None else self.ranks.size
        groups = self.call.groups
        sizes = Sizes(batch, groups, heads // groups, queries, keys, width, value_width)
        usage = Usage(True, self.call.tracks)
        planes = self._encode(self.query, q, usage, seed), self._encode_all(self.key, k, usage, seed)
        planes = *planes, self._encode_all(self.value, v, Usage(self.call.tracks, True), seed)
        row_scale, col_scale = self._scales_of_weights(next(iter(planes[0][0].parts.values())))
        parts = [part for each in planes for plane in each for part in plane.parts.values()]
        out, lse = torch.ops.duotone.attend(parts, seen, seed, row_scale, sizes, q.dtype, self.number, self.handle)
        y = from_heads(out.flatten(1, 2), self.call.layout)
        if not self.call.tracks:
            return y, ()
        saved_out = self.out.encode(out, ROWWISE, seed)
        if self.handle is not None and any(self.out.context.slots):
            y = after(y, saved_out[0].parts["scale"])
        # Backward reads one plane of value: only the product of forward reads the columnwise one.
        flat = [plane for each in (*planes[:2], planes[2][:1], saved_out) for plane in each]
        return y, (*flat, lse, seen, (sizes,), (seed,), (row_scale if col_scale is None else col_scale,))

    def _encode(self, operand: HeadOperand, x: Tensor, usage: Usage, seed: Tensor | None) -> list[Plane]:
        """The planes of heads in the layout of the stage."""
        if isinstance(x, QuantizedTensor):
            planes = operand.reuse(x, lambda codes: to_heads(codes, self.call.layout), usage)
            if planes is not None:
                return planes
            x = x.dequantize()
        heads = to_heads(x, self.call.layout)  # below, no method: Dynamo refuses it where a default device is set
        return operand.encode(torch.unflatten(heads, 1, (self.call.groups, -1)), usage, seed)

    def _encode_all(self, operand: HeadOperand, x: Tensor, usage: Usage, seed: Tensor | None) -> list[Plane]:
        """The planes of keys or values of all ranks. Codes travel where ranks agree on one scale."""
        if self.ranks is None:
            return self._encode(operand, x, usage, seed)
        x = x.dequantize() if isinstance(x, QuantizedTensor) else x
        if operand.context.shard is None:
            return self._encode(operand, self.ranks.gathered(x, token_axis(self.call.layout)), usage, seed)
        batch = to_heads(x, self.call.layout).shape[0]
        directions = [name for name, is_used in operand.usage(usage)._asdict().items() if is_used]
        planes = zip(self._encode(operand, x, usage, seed), directions, strict=True)
        return [self.ranks.gathered_plane(plane, direction, batch) for plane, direction in planes]

    def _scales_of_weights(self, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The delayed scales of probabilities. Their largest magnitude is 1 in every step."""
        one = like.new_ones((1, 1), dtype=torch.float32)
        row, col = self.weights.context.slots
        return row and row.scale_for(one), col and col.scale_for(one)

    def backward(self, dy: Tensor, saved: Saved, needs: Needs, *extra: Tensor) -> Gradients:
        *planes, lse, seen, (sizes,), (seed,), (scale,) = saved
        heads = torch.unflatten(dy, -1, (-1, sizes.value_width))
        gradient = self._encode(self.gradient, heads, Usage(True, True), seed)
        parts = [part for plane in (*planes, *gradient) for part in plane.parts.values()]
        call = parts, lse, seen, seed, scale, sizes, dy.dtype, self.number, self.handle
        gradients = torch.ops.duotone.attend_backward(*call)
        dq, dk, dv = (
            torch.unflatten(from_heads(each.flatten(1, 2), self.call.layout), -1, (-1, each.shape[-1]))
            for each in gradients
        )
        if self.ranks is not None:
            dk, dv = (self.ranks.summed(each, token_axis(self.call.layout)) for each in (dk, dv))
        return dq, dk, dv, None, None

    def operands(self, parts: Sequence[Tensor], sizes: Sizes, backward: bool) -> list[EncodedHeads]:
        """Query, key, value and, in backward, the saved output and its gradient, from their flat parts."""
        both = self.call.tracks
        encodings = [
            (self.query, sizes.query, Usage(True, both)),
            (self.key, sizes.key, Usage(True, both)),
            (self.value, sizes.value, ROWWISE if backward else Usage(both, True)),
        ]
        if backward:
            encodings += [(self.out, sizes.output, ROWWISE), (self.gradient, sizes.output, Usage(True, True))]
        encoded, at = [], 0
        for operand, shape, usage in encodings:
            planes = operand.planes(parts[at:], shape, usage)
            encoded.append(EncodedHeads(operand, planes, shape))
            at += sum(len(plane.parts) for plane in planes.values())
        return encoded


class OwnsStages(Protocol):
    """What has the stages of one module of attention."""

    def stage(self, call: Call) -> AttentionStage:
        """The stage of a call, with the delayed slots of the module."""
        ...


class OpCall(NamedTuple):
    """The arguments that both ops have in common. `p_scale` is a delayed scale of probabilities."""

    seen: Tensor | None
    seed: Tensor | None
    p_scale: Tensor | None
    sizes: Sequence[int]
    dtype: torch.dtype
    number: str
    handle: Tensor | None

    @property
    def stage(self) -> AttentionStage:
        """The stage that `number` names, with the slots of the module of `handle`. UserError if it is gone."""
        stage = STAGES.get(self.number)
        if stage is None:
            raise UserError("compiled attention ran after its module was gone; keep the module")
        return stage if self.handle is None else cast(OwnsStages, owner_of(number_of(self.handle))).stage(stage.call)

    @property
    def options(self) -> Options:
        """What the kernels are told besides tensors."""
        stage = self.stage
        return Options(stage.call.scale, stage.call.causal, stage.fast, self.dtype)

    @property
    def blocks(self) -> Blocks:
        """The call in blocks, for devices without a kernel."""
        call = self.stage.call
        return Blocks(call.scale, call.causal, call.dropout, self.seen, self.seed, self.dtype)


def _attend(parts: list[Tensor], *arguments: object) -> tuple[Tensor, Tensor]:
    call = OpCall(*arguments)  # type: ignore[arg-type]
    stage, shape = call.stage, Sizes(*call.sizes)
    query, key, value = stage.operands(parts, shape, backward=False)
    if stage.forward_kernel:
        planes = query.planes["rowwise"], key.planes["rowwise"], value.planes["columnwise"]
        natural, logs = attention.forward(planes, shape[:-1], call.p_scale, call.options, call.seen)
        out = natural.unflatten(2, (shape.groups, -1)).permute(0, 2, 3, 1, 4)
        return out, logs.unflatten(1, (shape.groups, -1)).unsqueeze(-1)
    q, k, v = query.values("rowwise"), key.values("rowwise"), value.values("columnwise")
    out, lse = attend(q, k, v, call.blocks, stage.weights, call.p_scale)
    return as_projected(out.to(call.dtype)), lse


def as_projected(heads: Tensor) -> Tensor:
    """Heads (batch, groups, heads, tokens, width) in the memory order of (batch, tokens, groups, heads, width)."""
    return heads.permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4)


def _attend_backward(parts: list[Tensor], lse: Tensor, *arguments: object) -> tuple[Tensor, Tensor, Tensor]:
    call = OpCall(*arguments)  # type: ignore[arg-type]
    stage, shape = call.stage, Sizes(*call.sizes)
    heads = stage.operands(parts, shape, backward=True)
    if stage.backward_kernel and (call.dtype.itemsize == 2 or lse.is_cpu):
        if stage.backward_kernel != KERNEL and call.seen is None:
            return _torch_backward(call, shape, heads, lse)
        if stage.problem.target.has_large_blocks:
            return _kernel_backward(call, shape, heads, lse)
    query, key, value, out, gradient = heads
    operands = BackwardOperands(*query.both, *key.both, value.values("rowwise"), *gradient.both)
    saved_out = out.values("rowwise")
    rounding = stage.weights, stage.scores_gradient, call.p_scale
    dq, dk, dv = (
        as_projected(each.to(call.dtype)) for each in differentiate(operands, saved_out, lse, call.blocks, *rounding)
    )
    return dq, dk, dv


def _kernel_backward(
    call: OpCall, shape: Sizes, heads: Sequence[EncodedHeads], lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The products of backward in the FP8 kernel."""
    problem, gradient = call.stage.problem, call.stage.scores_gradient
    slots = [slot for slot in gradient.context.slots if slot is not None]
    rounding = Rounding(
        problem.products["P^T dO"][0], problem.products["dS K"][0], call.p_scale, lse.new_ones(1) if slots else None
    )

    logs = lse.flatten(1, 2).squeeze(-1)
    query, key, value, out, d_out = heads
    planes = query.planes, key.planes, value.planes, out.planes, d_out.planes
    arguments = planes, shape[:-1], problem.native, logs, call.options, call.seen
    if slots:
        if gradient.is_new:
            *_, peak = attention.backward(rounding, *arguments)
            gradient.start(peak.view(1))
        scale, *_ = [slot.scale_for(lse.new_zeros((1, 1))) for slot in slots]
        rounding = rounding._replace(ds_scale=scale)
    *gradients, peak = attention.backward(rounding, *arguments)
    for slot in slots:
        slot.scale_for(peak.view(1, 1))
    dq, dk, dv = (each.unflatten(2, (shape.groups, -1)).permute(0, 2, 3, 1, 4) for each in gradients)
    return dq, dk, dv


def _torch_backward(
    call: OpCall, shape: Sizes, heads: Sequence[EncodedHeads], lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The products of backward in high precision, on the values of the planes."""
    q, k, v, out, gradient = (each.rows(call.dtype).flatten(1, 2) for each in heads)
    logs = lse.flatten(1, 2).squeeze(-1)
    dq, dk, dv = attention.torch_backward(gradient, (q, k, v), out, logs, call.options)
    of_query, of_key, of_value = (as_projected(each.unflatten(1, (shape.groups, -1))) for each in (dq, dk, dv))
    return of_query, of_key, of_value


def _empty(like: Tensor, shape: tuple[int, ...], dtype: object) -> Tensor:
    """Heads of this shape, like the results of the ops."""
    batch, groups, heads, tokens, width = shape
    empty = like.new_empty((batch, tokens, groups, heads, width), dtype=dtype)  # type: ignore[call-overload]
    return empty.permute(0, 2, 3, 1, 4)  # type: ignore[no-any-return]


def _fake_attend(parts: list[Tensor], *arguments: object) -> tuple[Tensor, Tensor]:
    *_, sizes, dtype, _, _ = arguments
    shape = Sizes(*sizes).output  # type: ignore[misc]
    return _empty(parts[0], shape, dtype), parts[0].new_empty((*shape[:-1], 1), dtype=torch.float32)


def _fake_attend_backward(parts: list[Tensor], *arguments: object) -> tuple[Tensor, ...]:
    *_, sizes, dtype, _, _ = arguments
    shape = Sizes(*sizes)  # type: ignore[misc]
    return tuple(_empty(parts[0], each, dtype) for each in (shape.query, shape.key, shape.value))


_CALL = "Tensor? seen, Tensor? seed, Tensor? scale, SymInt[] sizes, ScalarType dtype, str number, Tensor? handle"
_BACKWARD = f"attend_backward(Tensor[] parts, Tensor lse, {_CALL}) -> (Tensor, Tensor, Tensor)"
define_op(f"attend(Tensor[] parts, {_CALL}) -> (Tensor, Tensor)", _attend, _fake_attend)
define_op(_BACKWARD, _attend_backward, _fake_attend_backward, tags=STATEFUL)
