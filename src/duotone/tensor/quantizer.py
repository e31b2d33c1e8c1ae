"""A quantizer: a frozen pair of formats, one for each direction in which a GEMM reads the tensor."""

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from duotone.errors import UserError
from duotone.formats import get
from duotone.numbered import ByName, attribute_name, constant_in_traces
from duotone.tensor.context import LOCAL, QuantizeContext
from duotone.tensor.graph_casts import encoded
from duotone.tensor.plane import BOTH, Plane, Planes, Usage
from duotone.tensor.plane_encoder import PlaneEncoder
from duotone.tensor.plane_tensor import check_source, matrix_shape, plain
from duotone.tensor.quantized import QuantizedTensor


@dataclass(frozen=True)
class Quantizer(PlaneEncoder):
    """A frozen pair of formats, one for each direction. See `PlaneEncoder` for its fields.

    Subclasses may override `encode`. Defining a subclass lets `torch.load(weights_only=True)` read its tensors.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.is_plain = False
        torch.serialization.add_safe_globals([cls])

    @property
    def in_high_precision(self) -> "Quantizer":
        return Quantizer()

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
        if torch.compiler.is_dynamo_compiling() and self.is_plain:
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
        planes = encoded(self, x.reshape(matrix_shape(x.shape)), usage, ctx)
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


def quantizer_of(x: Tensor) -> Quantizer | None:
    """The quantizer of a quantized tensor, in the formats that it really holds."""
    if type(x) is Tensor or not isinstance(x, QuantizedTensor):
        return None
    is_activation = torch.compiler.is_dynamo_compiling() and not isinstance(x, torch.nn.Parameter)
    if is_activation and (words := x.traced_words):
        return getattr(TRACED, name_quantizer(words))
    row, col = x.planes
    quantizer = cast(Quantizer, x.quantizer)
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
