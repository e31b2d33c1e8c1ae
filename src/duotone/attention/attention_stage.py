"""Attention as a stage of a pipeline: it encodes heads, multiplies in blocks, and keeps planes for backward."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from uuid import uuid4

import torch
from torch import Tensor

from duotone.attention.blockwise import BackwardOperands, Blocks, attend, differentiate
from duotone.attention.head_planes import EncodedHeads, HeadOperand, TileOperand
from duotone.attention.heads import from_heads, to_heads, token_axis
from duotone.attention.ranks import Ranks
from duotone.dispatch import attention
from duotone.dispatch.attention import KERNEL, AttentionProblem, Options, Rounding
from duotone.dispatch.casts import PLAIN_TYPES, is_predicted
from duotone.pipeline.stage import Gradients, Needs, Saved, Stage
from duotone.tensor import QuantizedTensor
from duotone.tensor.plane import Plane, Usage


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
    problem: AttentionProblem
    """Decides `forward_kernel` and `backward_kernel`, where "" means blocks of keys in plain torch."""

    forward_kernel: str
    backward_kernel: str
    fast: bool
    ranks: Ranks | None
    """The ranks that share the sequence. Keys and values are then those of all ranks."""

    call: Call
    has_owner: bool = False
    """Whether scales are delayed, which only its module has."""
    row_part: str = ""

    arity = (4,)
    refusal = "the operands of attention are quantized"

    @property
    def words(self) -> str:
        """What decides its results besides the call. A text of its own if objects of a user do."""
        operands = self.query, self.key, self.value, self.gradient, self.out, self.weights, self.scores_gradient
        quantizers = [operand.quantizer for operand in operands]
        if not all(each.is_fixed for each in quantizers):
            return str(uuid4())
        formats = [(fmt and fmt.node_name) for each in quantizers for fmt in (each.rowwise, each.columnwise)]
        options = self.forward_kernel, self.backward_kernel, self.fast, self.query.context.propagate
        return repr((formats, [each.columnwise_source for each in quantizers], options))

    @property
    def rolls_forward_alone(self) -> bool:
        operands = self.query, self.key, self.value, self.weights
        forward = [slot for operand in operands for slot in operand.context.slots]
        return any(forward) and not any((*self.scores_gradient.context.slots, *self.gradient.context.slots))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, seed: Tensor | None
    ) -> tuple[Tensor, Saved]:
        (batch, heads, queries, width), groups = to_heads(q, self.call.layout).shape, self.call.groups
        keys = k.shape[token_axis(self.call.layout)] * (1 if self.ranks is None else self.ranks.size)
        sizes = Sizes(batch, groups, heads // groups, queries, keys, width, v.shape[-1])
        usage = Usage(True, self.call.tracks)
        planes = self._encode(self.query, q, usage, seed), self._encode_all(self.key, k, usage, seed)
        planes = *planes, self._encode_all(self.value, v, Usage(self.call.tracks, True), seed)
        row_scale, col_scale = self._scales_of_weights(next(iter(planes[0][0].parts.values())))
        operands = self._operands([plane for each in planes for plane in each], sizes, backward=False)
        out, lse = _attend(self, operands, row_scale, self._blocks(seen, seed, q.dtype))
        y = from_heads(out.flatten(1, 2), self.call.layout)
        if not self.call.tracks:
            return y, ()
        saved_out = self.out.encode(out, ROWWISE, seed)
        # Backward reads one plane of value: only the product of forward reads the columnwise one.
        flat = [plane for each in (*planes[:2], planes[2][:1], saved_out) for plane in each]
        return y, (*flat, lse, seen, row_scale if col_scale is None else col_scale, (sizes,), (seed,))

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
        planes = zip(self._encode(operand, x, usage, seed), operand.directions(usage), strict=True)
        return [self.ranks.gathered_plane(plane, direction, batch) for plane, direction in planes]

    def _scales_of_weights(self, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The delayed scales of probabilities. Their largest magnitude is 1 in every step."""
        one = like.new_ones((1, 1), dtype=torch.float32)
        row, col = self.weights.context.slots
        return row and row.scale_for(one), col and col.scale_for(one)

    def backward(self, dy: Tensor, saved: Saved, needs: Needs, *extra: Tensor) -> Gradients:
        *planes, lse, seen, scale, (sizes,), (seed,) = saved
        heads = torch.unflatten(dy, -1, (-1, sizes.value_width))
        gradient = self._encode(self.gradient, heads, Usage(True, True), seed)
        operands = self._operands([*planes, *gradient], sizes, backward=True)
        gradients = _differentiate(self, operands, lse, scale, self._blocks(seen, seed, dy.dtype))
        dq, dk, dv = (
            torch.unflatten(from_heads(each.flatten(1, 2), self.call.layout), -1, (-1, each.shape[-1]))
            for each in gradients
        )
        if self.ranks is not None:
            dk, dv = (self.ranks.summed(each, token_axis(self.call.layout)) for each in (dk, dv))
        return dq, dk, dv, None, None

    def _operands(self, planes: Iterable[Plane], sizes: Sizes, backward: bool) -> list[EncodedHeads]:
        """Query, key, value and, in backward, the saved output and its gradient, from all their planes."""
        both = Usage(True, self.call.tracks)
        encodings = [
            (self.query, sizes.query, both),
            (self.key, sizes.key, both),
            (self.value, sizes.value, ROWWISE if backward else Usage(self.call.tracks, True)),
        ]
        if backward:
            encodings += [(self.out, sizes.output, ROWWISE), (self.gradient, sizes.output, Usage(True, True))]
        remaining = iter(planes)
        return [
            EncodedHeads(operand, {name: next(remaining) for name in operand.directions(usage)}, shape)
            for operand, shape, usage in encodings
        ]

    def options(self, dtype: torch.dtype) -> Options:
        """What the kernels are told besides tensors, for results in a dtype."""
        return Options(self.call.scale, self.call.causal, self.fast, dtype)

    def _blocks(self, seen: Tensor | None, seed: Tensor | None, dtype: torch.dtype) -> Blocks:
        """What the products read besides planes, for results in a dtype."""
        return Blocks(self.call.scale, self.call.causal, self.call.dropout, seen, seed, dtype)


def _attend(
    stage: AttentionStage, heads: Sequence[EncodedHeads], p_scale: Tensor | None, blocks: Blocks
) -> tuple[Tensor, Tensor]:
    """The output, and log(sum(exp(S))) (*lead, queries, 1), from query, key and value.

    `p_scale` is a delayed scale of probabilities.
    """
    query, key, value = heads
    like = next(iter(next(iter(query.planes.values())).parts.values()))
    if is_predicted(like):
        out = _empty(like, (*query.shape[:-1], value.shape[-1]), blocks.like)
        return out, like.new_empty((*query.shape[:-1], 1), dtype=torch.float32)
    if stage.forward_kernel and type(like) in PLAIN_TYPES:  # a program of torch.export holds the blocks
        planes = query.planes["rowwise"], key.planes["rowwise"], value.planes["columnwise"]
        natural, logs = attention.forward(planes, _extents(heads), p_scale, stage.options(blocks.like), blocks.seen)
        out = natural.unflatten(2, (query.shape[1], -1)).permute(0, 2, 3, 1, 4)
        return out, logs.unflatten(1, (query.shape[1], -1)).unsqueeze(-1)
    q, k, v = query.values("rowwise"), key.values("rowwise"), value.values("columnwise")
    out, lse = attend(q, k, v, blocks, stage.weights, p_scale)
    return as_projected(out.to(blocks.like)), lse


def as_projected(heads: Tensor) -> Tensor:
    """Heads (batch, groups, heads, tokens, width) in the memory order of (batch, tokens, groups, heads, width)."""
    return heads.permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4)


def _differentiate(
    stage: AttentionStage, heads: Sequence[EncodedHeads], lse: Tensor, p_scale: Tensor | None, blocks: Blocks
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, from these, the saved output and its gradient."""
    query, key, value, out, gradient = heads
    dtype = blocks.like
    if is_predicted(lse):
        return _empty(lse, query.shape, dtype), _empty(lse, key.shape, dtype), _empty(lse, value.shape, dtype)
    if stage.backward_kernel and (dtype.itemsize == 2 or lse.is_cpu):
        if stage.backward_kernel != KERNEL and blocks.seen is None:
            return _torch_backward(stage, heads, lse, dtype)
        if stage.problem.target.has_large_blocks:
            return _kernel_backward(stage, heads, lse, p_scale, blocks)
    operands = BackwardOperands(*query.both, *key.both, value.values("rowwise"), *gradient.both)
    rounding = stage.weights, stage.scores_gradient, p_scale
    gradients = differentiate(operands, out.values("rowwise"), lse, blocks, *rounding)
    dq, dk, dv = (as_projected(each.to(dtype)) for each in gradients)
    return dq, dk, dv


def _kernel_backward(
    stage: AttentionStage, heads: Sequence[EncodedHeads], lse: Tensor, p_scale: Tensor | None, blocks: Blocks
) -> tuple[Tensor, Tensor, Tensor]:
    """The products of backward in the FP8 kernel."""
    problem, gradient = stage.problem, stage.scores_gradient
    slots = [slot for slot in gradient.context.slots if slot is not None]
    rounding = Rounding(
        problem.products["P^T dO"][0], problem.products["dS K"][0], p_scale, lse.new_ones(1) if slots else None
    )

    logs = lse.flatten(1, 2).squeeze(-1)
    query, key, value, out, d_out = heads
    planes = query.planes, key.planes, value.planes, out.planes, d_out.planes
    arguments = planes, _extents(heads), problem.native, logs, stage.options(blocks.like), blocks.seen
    if slots:
        if gradient.is_new:
            *_, peak = attention.backward(rounding, *arguments)
            gradient.start(peak.view(1))
        scale, *_ = [slot.scale_for(lse.new_zeros((1, 1))) for slot in slots]
        rounding = rounding._replace(ds_scale=scale)
    *gradients, peak = attention.backward(rounding, *arguments)
    for slot in slots:
        slot.scale_for(peak.view(1, 1))
    dq, dk, dv = (each.unflatten(2, (query.shape[1], -1)).permute(0, 2, 3, 1, 4) for each in gradients)
    return dq, dk, dv


def _torch_backward(
    stage: AttentionStage, heads: Sequence[EncodedHeads], lse: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The products of backward in high precision, on the values of the planes."""
    q, k, v, out, gradient = (each.rows(dtype).flatten(1, 2) for each in heads)
    logs = lse.flatten(1, 2).squeeze(-1)
    dq, dk, dv = attention.torch_backward(gradient, (q, k, v), out, logs, stage.options(dtype))
    of_query, of_key, of_value = (as_projected(each.unflatten(1, (heads[0].shape[1], -1))) for each in (dq, dk, dv))
    return of_query, of_key, of_value


def _extents(heads: Sequence[EncodedHeads]) -> tuple[int, ...]:
    """The sizes that kernels take: batch, groups, heads of a group, queries, keys and width."""
    return *heads[0].shape[:4], *heads[1].shape[3:]


def _empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Heads of this shape, like the results of the products."""
    batch, groups, heads, tokens, width = shape
    return like.new_empty((batch, tokens, groups, heads, width), dtype=dtype).permute(0, 2, 3, 1, 4)
