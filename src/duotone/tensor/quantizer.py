"""A quantizer: a frozen pair of formats, one for each direction in which a GEMM reads the tensor."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from duotone.errors import UserError
from duotone.formats import IDENTITY, Format
from duotone.tensor.context import LOCAL, QuantizeContext
from duotone.tensor.history import History
from duotone.tensor.plane import BOTH, Plane, Planes, Usage, encode_once
from duotone.tensor.quantized import QuantizedTensor
from duotone.tensor.writes import check_source, matrix_shape, plain

SOURCES = ("original", "rowwise_dequantized")


@dataclass(frozen=True)
class Quantizer:
    """`rowwise` encodes x, `columnwise` its transpose; None means that the direction is never made.

    `columnwise_source` is what the columnwise plane encodes: the original, or the dequantized rowwise plane, so that
    backward differentiates the function that forward computed. `history` holds the parameters of those directions
    whose format is delayed. Subclasses may override `encode`; defining one lets `torch.load(weights_only=True)` read
    tensors that carry it.
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
    def is_stochastic(self) -> bool:
        return any(f is not None and f.is_stochastic for f in (self.rowwise, self.columnwise))

    @property
    def delayed(self) -> tuple[bool, bool]:
        """Whether the rowwise and the columnwise plane take their scale from a slot of their own.

        Planes of one delayed format are one encoding, and share the rowwise slot.
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
        """Whether `encode` gives one tensor the same bits again, with the seed and the scales of the first time.

        A subclass with an `encode` of its own says so with `is_repeatable = True`.
        """
        return type(self).encode is Quantizer.encode

    def with_usage(self, rowwise: bool = True, columnwise: bool = True) -> "Quantizer":
        """The quantizer that makes only these planes."""
        return replace(
            self,
            rowwise=self.rowwise if rowwise else None,
            columnwise=self.columnwise if columnwise else None,
        )

    def encode(self, x: Tensor, usage: Usage = BOTH, ctx: QuantizeContext = LOCAL) -> Planes:
        """Planes of a 2-D tensor; only those that `usage` names are kept.

        The columnwise plane is derived from the rowwise one where that is lossless and both share a format.
        """
        if x.is_cuda and self.columnwise_source == "original":
            made = encode_once(
                self.rowwise if usage.rowwise else None, self.columnwise if usage.columnwise else None, x, ctx
            )
            if made is not None:
                return made
        wants_row = usage.rowwise and self.rowwise is not None
        wants_col = usage.columnwise and self.columnwise is not None
        follows = wants_col and self.columnwise_source != "original" and self.rowwise is not None
        row = None
        if wants_row or follows:
            assert self.rowwise is not None
            row = Plane.encode(self.rowwise, x, ctx)
        col = None
        if wants_col:
            source = row.dequantize(ctx.nominal or x.dtype) if follows and row is not None else x
            col = self._columnwise(source, None if follows else row, ctx)
        return Planes(row if wants_row else None, col)

    def encode_produced(self, made: Any, usage: Usage, ctx: QuantizeContext) -> Planes | None:
        """Planes of a matrix that kernels make on the way, or None where it has to be there first."""
        if type(self) is not Quantizer or self.columnwise_source != "original":
            return None
        wanted = self.rowwise if usage.rowwise else None, self.columnwise if usage.columnwise else None
        return encode_once(*wanted, made.x, ctx, made)

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

        Gradients pass through unchanged. Raises UserError where the dtype is none that formats encode.
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
        if torch.compiler.is_compiling() and type(self) is Quantizer:
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

        def new(extents: tuple[int, ...], part: torch.dtype) -> Tensor:
            return torch.empty(extents, dtype=part, device=device, pin_memory=pin_memory)

        row_format = self.rowwise if usage.rowwise else None
        col_format = self.columnwise if usage.columnwise else None
        row = None if row_format is None else Plane.empty(row_format, (rows, cols), new, dtype)
        col = self._empty_columnwise(row, col_format, (rows, cols), new, dtype)
        made = QuantizedTensor(Planes(row, col), self, torch.Size(shape), dtype, device=device)
        made.requires_grad_(requires_grad)
        return made

    def _empty_columnwise(
        self,
        row: Plane | None,
        fmt: Format | None,
        shape: tuple[int, int],
        new: Callable[[tuple[int, ...], torch.dtype], Tensor],
        dtype: torch.dtype,
    ) -> Plane | None:
        if fmt is None:
            return None
        if fmt.is_derivable:
            source = row if row is not None and row.format == fmt else Plane.empty(fmt, shape, new, dtype)
            return source.transposed()
        return Plane.empty(fmt, (shape[1], shape[0]), new, dtype, "col")

    def _columnwise(self, x: Tensor, row: Plane | None, ctx: QuantizeContext) -> Plane:
        assert self.columnwise is not None
        if not self.columnwise.is_derivable:
            return Plane.encode(self.columnwise, x.t(), ctx, plane="col")
        own = ctx.slots[1] if self.columnwise.is_delayed else None
        if row is None or row.format != self.columnwise or own is not None:
            if own is not None:
                ctx = replace(ctx, slots=(own, None))
            row = Plane.encode(self.columnwise, x, ctx)
        col = row.transposed()
        assert col is not None
        return col


class Quantize(torch.autograd.Function):
    """A tensor to its quantized form; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Quantizer, usage: Usage, context: QuantizeContext) -> QuantizedTensor:
        return quantizer.make(x, usage, context)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return gradients[0], None, None, None
