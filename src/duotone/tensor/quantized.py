"""QuantizedTensor: the one wrapper subclass, a logical tensor held as up to two planes.

It pretends to be a high-precision tensor of its nominal dtype and shape. What has no entry in the op table (`ops.py`)
runs on the dequantized values and gives a plain tensor; in-place operations write the result back, quantized. Reading
never needs the quantizer, which only describes the next write.
"""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from duotone.errors import MissingPlaneError
from duotone.tensor.context import LOCAL, QuantizeContext
from duotone.tensor.fsdp import ShardHooks
from duotone.tensor.plane import Plane, Planes, Usage
from duotone.tensor.writes import Writes, matrix_shape, plain, run_in_place, unshared

if TYPE_CHECKING:
    from duotone.tensor.quantizer import Quantizer

OPS: dict[Any, Callable[..., Any]] = {}
"""aten op -> its implementation on quantized tensors."""

INIT_VALUE = "_high_precision_init_val"
SIDES = ("rowwise", "columnwise")


class QuantizedTensor(ShardHooks, Writes):
    """Shape (*lead, K), held as a rowwise plane (M, K) and a columnwise plane (K, M), either of them absent.

    `context` is used by the next write: a tensor that is a shard says so there, and delayed scaling has its slots. It
    is never pickled. The shape may be any view of (M, K).
    """

    _rowwise: Plane | None
    _columnwise: Plane | None
    quantizer: "Quantizer"
    context: QuantizeContext
    is_piece: bool

    @staticmethod
    def __new__(
        cls,
        planes: Planes,
        quantizer: "Quantizer",
        shape: torch.Size,
        dtype: torch.dtype,
        *,
        device: torch.device | None = None,
        requires_grad: bool = False,
    ) -> "QuantizedTensor":
        plane = planes.rowwise or planes.columnwise
        device = plane.parts["codes"].device if plane is not None else device
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=requires_grad)
        self._rowwise, self._columnwise = planes
        self.quantizer = quantizer
        self.context = LOCAL
        self.is_piece = False
        return self

    @property
    def planes(self) -> Planes:  # type: ignore[override]
        return Planes(self._rowwise, self._columnwise)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(M, K) of the matrix that the planes hold."""
        row, col = self._rowwise, self._columnwise
        if row is not None:
            return row.shape
        return (col.shape[1], col.shape[0]) if col is not None else matrix_shape(self.shape)

    def get_usages(self) -> dict[str, bool]:
        """Which planes are there: what the data says, not what the quantizer would make."""
        return {"rowwise": self._rowwise is not None, "columnwise": self._columnwise is not None}

    def update_usage(self, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Drop (False), keep (None) or demand (True) a plane; a missing one is derived where that is lossless and gives
        the format that the quantizer makes there.

        Raises MissingPlaneError, before anything changes, where a demanded plane cannot be derived. Without planes the
        tensor is an empty shell that still knows its shape.
        """
        row, col = self._rowwise, self._columnwise
        if rowwise and row is None:
            row = self._derive(col, "rowwise")
        if columnwise and col is None:
            col = self._derive(self._rowwise, "columnwise")
        self._rowwise = None if rowwise is False else row
        self._columnwise = None if columnwise is False else col

    def _derive(self, other: Plane | None, missing: str) -> Plane:
        wanted = getattr(self.quantizer, missing)  # later writes make that one
        derived = None if other is None or other.format != wanted else other.transposed()
        if derived is None:
            held = "nothing" if other is None else f"a plane of {other.format.name}"
            remedy = "create it with that usage, or call materialize_usage(allow_requantize=True)"
            raise MissingPlaneError(
                f"{self!r} has no {missing} plane and none follows from {held} without loss; {remedy}"
            )
        return derived

    def materialize_usage(
        self, rowwise: bool = False, columnwise: bool = False, *, allow_requantize: bool = False
    ) -> None:
        """Make planes that are absent; with `allow_requantize` also by encoding the dequantized values anew."""
        wanted = Usage(rowwise and self._rowwise is None, columnwise and self._columnwise is None)
        try:
            self.update_usage(rowwise or None, columnwise or None)
        except MissingPlaneError:
            if not allow_requantize:
                raise
            made = self.quantizer.encode(self.values(self.dtype).reshape(self.matrix_shape), wanted, self.context)
            self._rowwise = self._rowwise or made.rowwise
            self._columnwise = self._columnwise or made.columnwise

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        """The values in `dtype` (nominal by default), from the more precise plane; on a tie the rowwise one.

        Gradients pass through unchanged.
        """
        if torch.is_grad_enabled() and self.requires_grad:
            return Dequantize.apply(self, dtype or self.dtype)  # type: ignore[no-any-return]
        return self.values(dtype or self.dtype)

    def values(self, dtype: torch.dtype) -> Tensor:
        """`dequantize` without a gradient; contiguous, as the tensor claims to be."""
        row, col = self._rowwise, self._columnwise
        if row is not None and (col is None or row.format.precision >= col.format.precision):
            return row.dequantize(dtype).reshape(self.shape).contiguous()
        if col is not None:
            return col.dequantize(dtype).t().reshape(self.shape).contiguous()
        raise MissingPlaneError(f"{self!r} holds no plane, so it has no values; make a new one with its quantizer")

    def __repr__(self) -> str:  # type: ignore[override]
        held = ", ".join(
            f"{side}={plane.format.name}" for side, plane in zip(SIDES, self.planes, strict=True) if plane is not None
        )
        return f"QuantizedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, {held or 'no planes'})"

    def with_planes(
        self,
        planes: Planes,
        shape: torch.Size | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> "QuantizedTensor":
        """A tensor of the same class, quantizer and context over other planes."""
        shape = self.shape if shape is None else shape
        made = type(self)(planes, self.quantizer, shape, dtype or self.dtype, device=device or self.device)
        made.context, made.is_piece = self.context, self.is_piece
        return made

    def with_memory(self, planes: Planes, shape: torch.Size | None = None, **kwargs: Any) -> "QuantizedTensor":
        """`with_planes` over memory of its own: no piece of anything."""
        made = self.with_planes(planes, shape, **kwargs)
        made.is_piece = False
        return made

    def share_memory_(self) -> "QuantizedTensor":
        """Move every buffer to memory that other processes can map."""
        for plane in self.planes:
            for part in plane.parts.values() if plane is not None else ():
                part.share_memory_()
        return self

    def get_high_precision_init_val(self) -> Tensor | None:
        """The CPU copy of the values before they were quantized, where `quantized_model_init` preserved it."""
        return self.__dict__.get(INIT_VALUE)

    def clear_high_precision_init_val(self) -> None:
        vars(self).pop(INIT_VALUE, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> "QuantizedTensor":
        made = self.with_memory(self.planes.map(torch.clone))
        made.requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, self.requires_grad)
            assert isinstance(made, QuantizedTensor)
        made.context = LOCAL
        memo[id(self)] = made
        stale = (
            {INIT_VALUE} if self.is_inference() or self._version else set()
        )  # of a tensor that was written; the copy starts with no writes
        for name in vars(self).keys() - vars(made).keys() - stale:
            setattr(made, name, copy.deepcopy(vars(self)[name], memo))
        made.grad = copy.deepcopy(self.grad, memo)
        return made

    def __getattr__(self, name: str) -> Tensor:
        """Buffers by name, "rowwise_codes" and so on: what the flatten protocol lists."""
        side, _, part = name.partition("_")
        if side in SIDES:
            plane = self.planes[SIDES.index(side)]
            if plane is not None and part in plane.parts:
                return plane.parts[part]
        raise AttributeError(f"QuantizedTensor has no attribute {name!r}")

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        planes = self.planes
        kinds = tuple(None if p is None else (p.format, tuple(p.parts), p.shape) for p in planes)
        flat = [
            f"{side}_{part}"
            for side, kind in zip(SIDES, kinds, strict=True)
            if kind is not None and not (side == "columnwise" and planes.aliased)
            for part in kind[1]
        ]
        return flat, (kinds, planes.aliased, self.quantizer, self.dtype, self.context, self.is_piece)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "QuantizedTensor":
        del stride
        kinds, aliased, quantizer, dtype, write_context, is_piece = context
        made: list[Plane | None] = []
        for side, kind in zip(SIDES, kinds, strict=True):
            if kind is None:
                made.append(None)
            elif side == "columnwise" and aliased:
                assert made[0] is not None
                made.append(made[0].transposed())
            else:
                fmt, parts, shape = kind
                made.append(Plane(fmt, {part: inner[f"{side}_{part}"] for part in parts}, shape))
        tensor = QuantizedTensor(Planes(*made), quantizer, torch.Size(size), dtype)
        tensor.context, tensor.is_piece = write_context, is_piece
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in OPS:
            decomposed = func.decompose(*args, **kwargs)  # only inference mode brings composite operations here
            if decomposed is not NotImplemented:
                return decomposed
        if torch.is_inference_mode_enabled() and func.is_view and not args[0].is_inference():
            # A view of a tensor that counts its versions counts them too, which no inference tensor can.
            with torch.inference_mode(False), torch._C._AutoDispatchBelowAutograd():
                return _run(func, args, kwargs)
        return _run(func, args, kwargs)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    if func in OPS:
        return OPS[func](*args, **kwargs)
    if func._schema.is_mutable:
        return run_in_place(func, args, kwargs)
    plain_args, plain_kwargs = tree_map(unshared if func.is_view else plain, (args, kwargs))
    return func(*plain_args, **plain_kwargs)


class Dequantize(torch.autograd.Function):
    """The values of a quantized tensor; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, t: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = t.dtype
        return t.values(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].to(ctx.dtype), None
