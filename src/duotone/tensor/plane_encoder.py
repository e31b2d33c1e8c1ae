"""PlaneEncoder: the formats of both directions in which a GEMM reads a tensor, and how they encode it."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor

from duotone.dispatch.casts import one_read
from duotone.dispatch.stages import stages_for
from duotone.errors import UserError
from duotone.formats import IDENTITY, Format
from duotone.formats.elements import Stages
from duotone.tensor.content import WithContent
from duotone.tensor.context import LOCAL, NO_AMAXES, Amaxes, QuantizeContext, Slot
from duotone.tensor.history import History
from duotone.tensor.plane import BOTH, Plane, Planes, Usage, derived, encode_once

if TYPE_CHECKING:
    from duotone.kernels.activations import FusedProducer

SOURCES = ("original", "rowwise_dequantized")


@dataclass(frozen=True)
class PlaneEncoder(WithContent):
    """The part of a quantizer that makes planes. `rowwise` encodes x, `columnwise` its transpose.

    A direction that is None is never encoded.

    `columnwise_source` is what the columnwise plane encodes: "original", or "rowwise_dequantized", with which backward
    differentiates the function that forward computed. `history` holds the parameters of delayed directions.
    """

    rowwise: Format | None = IDENTITY
    columnwise: Format | None = IDENTITY
    columnwise_source: str = "original"
    history: History | None = None

    is_plain: ClassVar[bool] = True
    """Whether the class is Duotone's: one of a user may do more with what it holds."""

    def __post_init__(self) -> None:
        for fmt in (self.rowwise, self.columnwise):
            if fmt is not None and not hasattr(fmt, "epilogue"):
                raise UserError(f"a quantizer takes formats; got {fmt!r}: use duotone.formats.get(name)")
        if self.columnwise_source not in SOURCES:
            raise UserError(
                f"columnwise_source {self.columnwise_source!r} is unknown; allowed are {', '.join(SOURCES)}"
            )

    @property
    def words(self) -> str:
        """The formats and `columnwise_source`, which a graph holds as a constant."""
        row, col = ("" if fmt is None else fmt.name for fmt in (self.rowwise, self.columnwise))
        return f"{row}/{col}/{self.columnwise_source}"

    @property
    def content(self) -> Hashable:
        """A value that equal quantizers share: the quantizer, or all attributes of a user's class."""
        return self if self.is_plain else super().content

    @property
    def is_fixed(self) -> bool:
        """Whether it holds no class, object or function of a user, which may change."""
        formats = [fmt for fmt in (self.rowwise, self.columnwise) if fmt is not None]
        parameters = () if self.history is None else vars(self.history).values()
        return self.is_plain and all(fmt.node_name for fmt in formats) and not any(map(callable, parameters))

    @property
    def is_stochastic(self) -> bool:
        """Whether a format rounds stochastically."""
        return any(f is not None and f.is_stochastic for f in (self.rowwise, self.columnwise))

    @property
    def delayed(self) -> tuple[bool, bool]:
        """Whether the rowwise and the columnwise plane each have a slot for a delayed scale.

        Two planes of one delayed format are one encoding and share the rowwise slot.
        """
        row = self.rowwise is not None and self.rowwise.is_delayed
        col = self.columnwise is not None and self.columnwise.is_delayed
        shared = row and self.rowwise == self.columnwise and self.columnwise_source == "original"
        return row, col and not shared

    @property
    def is_requantization_safe(self) -> bool:
        """Whether quantizing the same tensor twice gives the same bits: no delayed scale, no stochastic rounding."""
        return not (self.is_stochastic or any(self.delayed))

    @property
    def is_repeatable(self) -> bool:
        """Whether `encode` repeats its bits for the same tensor, seed and scales.

        A subclass that overrides `encode` sets `is_repeatable = True` if it does.
        """
        return type(self).encode is PlaneEncoder.encode

    @property
    def derives_columnwise(self) -> bool:
        """Whether `encode` derives the columnwise plane from the rowwise one."""
        same = self.rowwise is not None and self.rowwise == self.columnwise and self.rowwise.is_derivable
        return same and self.columnwise_source == "original" and type(self).encode is PlaneEncoder.encode

    def with_usage(self, rowwise: bool = True, columnwise: bool = True) -> Self:
        """The quantizer that makes only these planes."""
        return replace(
            self,
            rowwise=self.rowwise if rowwise else None,
            columnwise=self.columnwise if columnwise else None,
        )

    def encode(self, x: Tensor, usage: Usage = BOTH, ctx: QuantizeContext = LOCAL) -> Planes:
        """The planes of a 2-D tensor (M, K) that `usage` names.

        The columnwise plane is derived from the rowwise one if that is lossless and both share a format.
        """
        row_format = self.rowwise if usage.rowwise else None
        col_format = self.columnwise if usage.columnwise else None
        if self.columnwise_source != "original" and self.rowwise is not None and col_format is not None:
            row = encode_plane(self.rowwise, x, ctx)
            other = ctx if ctx.shard is None else replace(ctx, amaxes=NO_AMAXES)  # of other values
            col = _columnwise(col_format, row.dequantize(ctx.nominal or x.dtype), None, other, stages_for(x))
            return Planes(row if usage.rowwise else None, col)
        if x.is_cuda:
            planes = encode_once(row_format, col_format, x, ctx)
            if planes is not None:
                return planes
        stages = stages_for(x)
        if ctx.shard is not None:
            ctx = replace(ctx, amaxes=ctx.agreed(lambda dim: (self.shared_amaxes(x, usage, ctx), (True, True))))
        row = None if row_format is None else encode_plane(row_format, x, ctx, stages=stages)
        return Planes(row, None if col_format is None else _columnwise(col_format, x, row, ctx, stages))

    def shared_amaxes(self, x: Tensor, usage: Usage, ctx: QuantizeContext) -> Amaxes:
        """The amaxes of a shard x (M, K) on which the shards have to agree before `encode`, for each plane.

        None for a plane that needs none, that is derived from the other one, or that encodes what the other one holds.
        """
        row, col = self.rowwise if usage.rowwise else None, self.columnwise if usage.columnwise else None
        if self.columnwise_source != "original" and col is not None:
            row, col = self.rowwise, None
        if row is not None and row == col and row.is_derivable:
            col = None
        shard, stages = ctx.shard, stages_for(x)
        assert shard is not None
        if x.is_cuda and not torch.compiler.is_dynamo_compiling() and (cast := one_read(row, col, x, ctx.propagate)):
            amaxes, spans = cast.measure(x.contiguous(), shard.dim)
            return amaxes[0] if spans[0] else None, amaxes[1] if spans[1] else None
        of_row = row and row.shared_amax(x, shard.dim, stages, ctx.propagate)
        if col is None or col.is_derivable:
            return of_row, col and col.shared_amax(x, shard.dim, stages, ctx.propagate)
        return of_row, col.shared_amax(x.t(), 1 - shard.dim, stages, ctx.propagate)

    def encode_produced(self, producer: "FusedProducer", usage: Usage, ctx: QuantizeContext) -> Planes | None:
        """Like `encode`, but the cast kernel also computes the matrix. None if no kernel does; then materialize it."""
        if not self.is_plain or self.columnwise_source != "original":
            return None
        formats = self.rowwise if usage.rowwise else None, self.columnwise if usage.columnwise else None
        return encode_once(*formats, producer.x, ctx, producer)

    @property
    def in_high_precision(self) -> "PlaneEncoder":
        """A quantizer that leaves both directions as they are."""
        raise NotImplementedError


def encode_plane(
    fmt: Format, x: Tensor, ctx: QuantizeContext = LOCAL, plane: str = "row", stages: Stages | None = None
) -> Plane:
    """Encode a 2-D tensor, contraction last. `plane` is "row", or "col" if x is the transpose of the tensor.

    `stages` are those for `x`, if they are known.
    """
    columnwise = plane == "col"
    if x.is_cuda:
        planes = encode_once(None, fmt, x.t(), ctx) if columnwise else encode_once(fmt, None, x, ctx)
        if planes is not None:
            return planes.columnwise if columnwise else planes.rowwise  # type: ignore[return-value]
    side = 1 if columnwise else 0  # Dynamo of torch 2.11 takes no bool as an index
    shard, slot = ctx.shard, ctx.slots[side]
    scale = slot.scale_for(x) if slot is not None and fmt.is_delayed else None
    stages = stages or stages_for(x)
    amax = None if fmt.is_delayed else ctx.amaxes[side]
    if shard is not None and amax is None:
        amax = fmt.shared_amax(x, 1 - shard.dim if columnwise else shard.dim, stages, ctx.propagate)
        amax = amax if amax is None else shard.max(amax)
    parts = fmt.encode(x, scale=scale, amax=amax, seed=ctx.seed, plane=plane, stages=stages, propagate=ctx.propagate)
    return Plane(fmt, parts, (x.shape[0], x.shape[1]))


def _columnwise(fmt: Format, x: Tensor, row: Plane | None, ctx: QuantizeContext, stages: Stages) -> Plane:
    """The plane of x transposed, derived from the rowwise one if both have a derivable format and one slot."""
    if not fmt.is_derivable:
        return encode_plane(fmt, x.t(), ctx, "col", stages)
    slot = ctx.slots[1] if fmt.is_delayed else None
    if row is None or row.format != fmt or slot is not None:
        row = encode_plane(fmt, x, _of_columns(ctx, slot), stages=stages)
    return derived(row)


def _of_columns(ctx: QuantizeContext, slot: Slot | None) -> QuantizeContext:
    """The context in which a plane that is encoded as a rowwise one becomes the columnwise one."""
    if slot is None and ctx.amaxes[0] is None is ctx.amaxes[1]:
        return ctx
    return replace(ctx, slots=ctx.slots if slot is None else (slot, None), amaxes=(ctx.amaxes[1], None))


def encodes_alone(quantizer: object) -> bool:
    """Whether planes follow from the tensor, the formats and the context: no class of a user has its own encode."""
    return getattr(type(quantizer), "encode", None) is PlaneEncoder.encode
