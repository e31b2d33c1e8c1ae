"""A quantizer: a frozen pair of formats, one for each direction in which a GEMM reads the tensor."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from duotone.dispatch.casts import one_read
from duotone.dispatch.stages import stages_for
from duotone.errors import UserError
from duotone.formats import IDENTITY, Format, get
from duotone.formats.elements import Stages
from duotone.numbered import ByName, attribute_name, constant_in_traces
from duotone.tensor.content import WithContent
from duotone.tensor.context import LOCAL, NO_AMAXES, Amaxes, QuantizeContext, Slot
from duotone.tensor.history import History
from duotone.tensor.plane import BOTH, Plane, Planes, Usage, derived, encode_once
from duotone.tensor.plane_tensor import check_source, matrix_shape, plain
from duotone.tensor.quantized import QuantizedTensor

if TYPE_CHECKING:
    from duotone.kernels.activations import FusedProducer

SOURCES = ("original", "rowwise_dequantized")


@dataclass(frozen=True)
class Quantizer(WithContent):
    """`rowwise` encodes x, `columnwise` its transpose. A direction that is None is never encoded.

    `columnwise_source` is what the columnwise plane encodes: "original", or "rowwise_dequantized", with which backward
    differentiates the function that forward computed. `history` holds the parameters of delayed directions.

    Subclasses may override `encode`. Defining a subclass lets `torch.load(weights_only=True)` read its tensors.
    """

    rowwise: Format | None = IDENTITY
    columnwise: Format | None = IDENTITY
    columnwise_source: str = "original"
    history: History | None = None

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        torch.serialization.add_safe_globals([cls])

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
        return self if type(self) is Quantizer else super().content

    @property
    def is_fixed(self) -> bool:
        """Whether it holds no class, object or function of a user, which may change."""
        formats = [fmt for fmt in (self.rowwise, self.columnwise) if fmt is not None]
        parameters = () if self.history is None else vars(self.history).values()
        return type(self) is Quantizer and all(fmt.node_name for fmt in formats) and not any(map(callable, parameters))

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
        return type(self).encode is Quantizer.encode

    @property
    def derives_columnwise(self) -> bool:
        """Whether `encode` derives the columnwise plane from the rowwise one."""
        same = self.rowwise is not None and self.rowwise == self.columnwise and self.rowwise.is_derivable
        return same and self.columnwise_source == "original" and type(self).encode is Quantizer.encode

    def with_usage(self, rowwise: bool = True, columnwise: bool = True) -> "Quantizer":
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
        """The amaxes of a shard x (M, K) on which the shards have to agree before `Quantizer.encode`, for each plane.

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
        if type(self) is not Quantizer or self.columnwise_source != "original":
            return None
        formats = self.rowwise if usage.rowwise else None, self.columnwise if usage.columnwise else None
        return encode_once(*formats, producer.x, ctx, producer)

    def quantize(
        self,
        x: Tensor,
        *,
        usage: Usage = BOTH,
        ctx: QuantizeContext = LOCAL,
        out: QuantizedTensor | None = None,
        noop_flag: Tensor | None = None,
    ) -> QuantizedTensor:
        """(*lead, K) -> a quantized tensor of the same nominal shape and dtype, or `out`, rewritten in place.

        Gradients pass through unchanged. Raises UserError for a dtype that formats do not encode.
        """
        if out is not None:
            if not isinstance(out, QuantizedTensor):
                raise TypeError(
                    f"quantize writes a QuantizedTensor; got {type(out).__name__}: make one with make_empty"
                )
            return out.quantize_(x, quantizer=self, usage=usage, noop_flag=noop_flag, ctx=ctx)
        if noop_flag is not None:
            raise UserError("a noop_flag keeps the bytes of `out`, and no `out` was given; pass the tensor to keep")
        check_source(x)
        if torch.compiler.is_dynamo_compiling() and type(self) is Quantizer:
            from duotone.tensor.traced_quantize import quantize_traced  # imports Dynamo

            return quantize_traced(self, x, usage, ctx)
        return self.quantized(x, usage, ctx)

    def __call__(self, x: Tensor, **kwargs: Any) -> QuantizedTensor:
        """`quantize`."""
        return self.quantize(x, **kwargs)

    def quantized(self, x: Tensor, usage: Usage, ctx: QuantizeContext) -> QuantizedTensor:
        """`quantize` without its checks."""
        if torch.is_grad_enabled() and x.requires_grad:
            return Quantize.apply(x, self, usage, ctx)  # type: ignore[no-any-return]
        return self.make(x, usage, ctx)

    def make(self, x: Tensor, usage: Usage = BOTH, ctx: QuantizeContext = LOCAL) -> QuantizedTensor:
        """`quantize` without a gradient."""
        check_source(x)
        x = plain(x.detach())
        planes = self.encode(x.reshape(matrix_shape(x.shape)), usage, ctx)
        return QuantizedTensor(planes, self, x.shape, x.dtype, device=x.device)

    def make_empty(
        self,
        shape: tuple[int, ...],
        *,
        usage: Usage = BOTH,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> QuantizedTensor:
        """A tensor of the buffers that `quantize` would make, uninitialised."""
        rows, cols = matrix_shape(torch.Size(shape))
        device = torch.get_default_device() if device is None else torch.device(device)
        new = partial(torch.empty, device=device, pin_memory=pin_memory)
        row_format = self.rowwise if usage.rowwise else None
        col_format = self.columnwise if usage.columnwise else None
        row = row_format and Plane.empty(row_format, (rows, cols), new, dtype)
        if col_format is not None and col_format.is_derivable:
            source = row if row_format == col_format else None
            col = (source or Plane.empty(col_format, (rows, cols), new, dtype)).transposed()
        else:
            col = col_format and Plane.empty(col_format, (cols, rows), new, dtype, "col")
        empty = QuantizedTensor(Planes(row, col), self, torch.Size(shape), dtype, device=device)
        empty.requires_grad_(requires_grad)
        return empty


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


class Quantize(torch.autograd.Function):
    """A tensor to its quantized form. The gradient passes unchanged."""

    @staticmethod
    def forward(
        ctx: object, x: Tensor, quantizer: Quantizer, usage: Usage, context: QuantizeContext
    ) -> QuantizedTensor:
        return quantizer.make(x, usage, context)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return gradients[0], None, None, None


def encodes_alone(quantizer: object) -> bool:
    """Whether planes follow from the tensor, the formats and the context: no class of a user has its own encode."""
    return getattr(type(quantizer), "encode", None) is Quantizer.encode


def quantizer_of(x: Tensor) -> Quantizer | None:
    """The quantizer of a quantized tensor, in the formats that it really holds."""
    if type(x) is Tensor or not isinstance(x, QuantizedTensor):
        return None
    is_activation = torch.compiler.is_dynamo_compiling() and not isinstance(x, torch.nn.Parameter)
    if is_activation and (words := x.traced_words):
        return getattr(TRACED, name_quantizer(words))
    row, col = x.planes
    quantizer = x.quantizer
    if (row is None or quantizer.rowwise == row.format) and (col is None or quantizer.columnwise == col.format):
        return quantizer
    return Quantizer(row.format if row else quantizer.rowwise, col.format if col else quantizer.columnwise)


TRACED = ByName()
"""Quantizers by their words, of tensors that graphs make."""


@constant_in_traces
def name_quantizer(words: str) -> str:
    """The name in `TRACED` of the quantizer that `words` stand for, without a history."""
    (row, col, source), name = words.split("/"), attribute_name(words)
    if not hasattr(TRACED, name):
        setattr(TRACED, name, Quantizer(get(row) if row else None, get(col) if col else None, source))
    return name
