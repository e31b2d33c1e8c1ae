"""PlaneTensor: a logical tensor held as up to two planes, and everything that reads it.

It pretends to be a high-precision tensor of its nominal dtype and shape. Reading never needs the quantizer.
"""

import math
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

import torch
from torch import Tensor, nn

from duotone.errors import MissingPlaneError, UserError
from duotone.formats import IDENTITY, Format
from duotone.formats.format import require_dense
from duotone.tensor.context import LOCAL, QuantizeContext
from duotone.tensor.plane import Plane, Planes, Usage, same_memory
from duotone.tensor.plane_encoder import PlaneEncoder

if TYPE_CHECKING:
    from duotone.tensor.gathers import Gathers

T = TypeVar("T")
HIGH_PRECISION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INIT_VALUE = "_high_precision_init_val"
CONVERTED = "_versions_of_conversion"
"""Of a parameter: its version before it was converted to another format, and after."""
SIDES = ("rowwise", "columnwise")
ENTRY = "_values_by_address"
"""Marks an entry of a state_dict. It holds a copy of the values as soon as their address was asked for."""


class Decodable(Tensor):
    """A tensor of which other operations of torch get the decoded values."""

    def values(self, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        """The values in `dtype`, without a gradient."""
        raise NotImplementedError

    def require_writable(self) -> None:
        """MissingPlaneError if a write would be lost."""
        raise NotImplementedError

    @property
    def whole(self) -> "PlaneTensor":
        """The tensor that has the planes: that of a view, or itself."""
        raise NotImplementedError

    def write(self, values: Tensor) -> None:
        """Take these values, which may round them."""
        raise NotImplementedError


class PlaneTensor(Decodable):
    """Shape (*lead, K), held as a rowwise plane (M, K) and a columnwise plane (K, M). Either may be absent.

    The shape may be any view of (M, K). `quantizer` and `context` describe the next write. The context holds the group
    of a shard and the slots of delayed scaling. It is never pickled. `is_piece`: the planes are views of a part of
    another tensor's planes.
    """

    _rowwise: Plane | None
    _columnwise: Plane | None
    quantizer: PlaneEncoder
    context: QuantizeContext
    is_piece: bool
    is_blank: bool = False
    """Whether `empty_like` or `new_empty` just made it: it has no values, and nothing else holds its planes."""
    gathers: "Gathers | None" = None
    """The gathers of a shard of FSDP2, or of the whole tensor that they return."""

    def __new__(
        cls,
        planes: Planes,
        quantizer: PlaneEncoder,
        shape: torch.Size,
        dtype: torch.dtype,
        *,
        device: torch.device | None = None,
        requires_grad: bool = False,
    ) -> Self:
        plane = planes.rowwise or planes.columnwise
        device = plane.parts["codes"].device if plane is not None else device
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=requires_grad)
        self._rowwise, self._columnwise = planes
        self.quantizer = quantizer
        self.context = LOCAL
        self.is_piece = False
        return self

    @property
    def whole(self) -> "PlaneTensor":
        return self

    @property
    def planes(self) -> Planes:
        """The planes that the tensor holds."""
        return Planes(self._rowwise, self._columnwise)

    @property
    def parts(self) -> list[Tensor]:
        """The buffers of both planes, rowwise first."""
        return [part for plane in self.planes if plane is not None for part in plane.parts.values()]

    @property
    def formats(self) -> tuple[Format | None, Format | None]:
        """(rowwise, columnwise) formats; None for an absent plane."""
        return self.planes.formats

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(M, K) of the matrix that the planes hold."""
        row, col = self._rowwise, self._columnwise
        if row is not None:
            return row.shape
        return (col.shape[1], col.shape[0]) if col is not None else matrix_shape(self.shape)

    @property
    def derives_columnwise(self) -> bool:
        """Whether the columnwise plane always is the transpose of the rowwise one."""
        row, col = self.formats
        return self.planes.aliased or (row is not None and row == col and self.quantizer.derives_columnwise)

    def get_usages(self) -> dict[str, bool]:
        """The planes that the tensor holds. Its quantizer may compute others."""
        return {"rowwise": self._rowwise is not None, "columnwise": self._columnwise is not None}

    def update_usage(self, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Drop (False), keep (None) or demand (True) a plane.

        A missing plane is derived if that loses nothing and gives the format that the quantizer makes there. Raises
        MissingPlaneError, before anything changes, if a demanded plane cannot be derived. Without planes the tensor is
        an empty shell that still has its shape.
        """
        row, col = self._rowwise, self._columnwise
        if rowwise and row is None:
            row = self._derive(col, self.quantizer.rowwise, "rowwise")
        if columnwise and col is None:
            col = self._derive(self._rowwise, self.quantizer.columnwise, "columnwise")
        self._rowwise = None if rowwise is False else row
        self._columnwise = None if columnwise is False else col

    def _derive(self, other: Plane | None, fmt: Format | None, missing: str) -> Plane:
        derived = None if other is None or other.format != fmt else other.transposed()
        if derived is None:
            source = "nothing" if other is None else f"a plane of {other.format.name}"
            remedy = "create it with that usage, or call materialize_usage(allow_requantize=True)"
            raise MissingPlaneError(
                f"{self!r} has no {missing} plane and none follows from {source} without loss; {remedy}"
            )
        return derived

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values in `dtype` (nominal by default), from the more precise plane, on a tie the rowwise one.

        Gradients pass through unchanged.
        """
        if torch.is_grad_enabled() and self.requires_grad:
            return Dequantize.apply(self, dtype or self.dtype)  # type: ignore[no-any-return]
        return self.values(dtype or self.dtype)

    def values(self, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        """`dequantize` without a gradient. Contiguous, as the tensor claims to be."""
        row, col = self._rowwise, self._columnwise
        reads_row = row is not None and (col is None or row.format.precision >= col.format.precision)
        if not torch.compiler.is_dynamo_compiling() and self.gathers is not None:
            row, col = self.gathers.readable(self.planes, Usage(reads_row, not reads_row))
        if row is not None and reads_row:
            return row.dequantize(dtype).reshape(self.shape).contiguous()
        if col is not None:
            return col.dequantize(dtype).t().reshape(self.shape).contiguous()
        raise MissingPlaneError(f"{self!r} holds no plane, so it has no values; make a new one with its quantizer")

    def __repr__(self) -> str:  # type: ignore[override]
        planes = ", ".join(
            f"{side}={fmt.name}" for side, fmt in zip(SIDES, self.formats, strict=True) if fmt is not None
        )
        return f"QuantizedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, {planes or 'no planes'})"

    def with_planes(
        self,
        planes: Planes,
        shape: torch.Size | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        is_piece: bool | None = None,
    ) -> Self:
        """A tensor of the same class, quantizer and context over other planes.

        `is_piece` is false for planes with memory that no other tensor shares.
        """
        shape = self.shape if shape is None else shape
        other = type(self)(planes, self.quantizer, shape, dtype or self.dtype, device=device or self.device)
        if self.is_blank:
            self.is_blank = False  # from now on another tensor may hold its planes
        other.context, other.is_piece = self.context, self.is_piece if is_piece is None else is_piece
        if self.gathers is not None and planes == self.gathers.whole:
            other.gathers = self.gathers
        return other

    def share_memory_(self) -> Self:
        """Move every buffer to memory that other processes can map."""
        for part in self.parts:
            part.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether other processes can map every buffer."""
        return all(part.untyped_storage().is_shared() for part in self.parts)

    def get_high_precision_init_val(self) -> Tensor | None:
        """The CPU copy of the values before they were quantized, if `quantized_model_init` preserved it."""
        return self.__dict__.get(INIT_VALUE)

    def clear_high_precision_init_val(self) -> None:
        """Free the first values in high precision."""
        vars(self).pop(INIT_VALUE, None)

    def data_ptr(self) -> int:
        """The address of a copy of the values in the nominal dtype. UserError unless this is a state_dict's entry."""
        return self._values_now().data_ptr() if is_entry(self) else self._refuse()

    def _refuse(self, *_: object, **_options: object) -> NoReturn:
        """UserError: a quantized tensor has no address at which torch could read values."""
        raise UserError(
            "a quantized tensor is planes, and has no address of values; use dequantize(), or save state_dict()"
        )

    __dlpack__ = apply_ = map_ = _refuse  # type: ignore[assignment]

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory at `data_ptr()`. It is empty if this is not an entry of a state_dict."""
        return self._values_now().untyped_storage() if is_entry(self) else super().untyped_storage()

    def _values_now(self) -> Tensor:
        """The copy, which keeps its address, with the values that the planes have now."""
        values, copy = self.values(self.dtype), vars(self)[ENTRY]
        if copy is None:
            copy = vars(self)[ENTRY] = torch.empty_like(values)
        return copy.copy_(values)


class Dequantize(torch.autograd.Function):
    """The values of a quantized tensor. The gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, t: PlaneTensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = t.dtype
        return t.values(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].to(ctx.dtype), None


def check_source(x: object) -> None:
    """UserError unless `x` is a dense tensor in a dtype that formats encode."""
    if not isinstance(x, Tensor):
        raise UserError(f"only a tensor can be quantized; got {type(x).__name__}: make it one")
    require_dense("a quantizer", x)
    if x.dtype not in HIGH_PRECISION_DTYPES:
        raise UserError(f"a quantizer takes bf16, fp16 and fp32; got {x.dtype}: cast it first")


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """(*lead, K) -> (M, K)."""
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def plain(value: T) -> T | Tensor:
    """The values of a quantized tensor or of a view of one. All other arguments are returned unchanged."""
    return value.values(value.dtype) if isinstance(value, Decodable) else value


def values_as(t: Decodable, dtype: torch.dtype) -> Tensor:
    """A quantized tensor's values in any dtype, rounded once. They may share the memory of a plane."""
    return t.values(dtype if dtype in HIGH_PRECISION_DTYPES else torch.float32).to(dtype)


def unshared(value: T) -> T | Tensor:
    """`plain`, but a copy if the tensor has two planes: a write to one of them would make the planes differ."""
    values = plain(value)
    if isinstance(value, PlaneTensor) and None not in value.planes and not value.planes.aliased:
        assert isinstance(values, Tensor)
        return values.clone() if any(p and same_memory(values, p.parts["codes"]) for p in value.planes) else values
    return values


def shared_values(t: PlaneTensor) -> Tensor | None:
    """The values of an Identity plane, with its strides: writes to them reach the tensor. None if there is no such."""
    row, col = t.planes
    if t.gathers is None and row is not None and row.format == IDENTITY and (col is None or t.planes.aliased):
        return row.dequantize(t.dtype).reshape(t.shape)
    return None


def mark_entry(t: Tensor | None) -> None:
    """Let code that reads memory at an address, as safetensors does, find the values of a quantized tensor there.

    Other tensors do not change. Parameters have no address, because writes of other code to it would be lost.
    """
    if isinstance(t, PlaneTensor) and not isinstance(t, nn.Parameter):
        vars(t)[ENTRY] = None


def is_entry(t: PlaneTensor) -> bool:
    """Whether `mark_entry` marked this tensor, and it is no parameter."""
    return ENTRY in vars(t) and not isinstance(t, nn.Parameter)
