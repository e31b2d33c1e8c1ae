"""QuantizedTensor: the one wrapper subclass, a logical tensor held as up to two planes.

It pretends to be a high-precision tensor of its nominal dtype and shape. Whatever has no entry in `OPS` runs on the
dequantized values and gives a plain tensor. Reading never needs the quantizer, which only describes the next write.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from duotone.errors import UsageError, UserError
from duotone.tensor.plane import Plane
from duotone.tensor.quantizer import Planes, Quantizer, Usage

aten = torch.ops.aten
OPS: dict[Any, Callable[..., Any]] = {}


class QuantizedTensor(torch.Tensor):
    """Shape (*lead, K), held as a rowwise plane (M, K) and a columnwise plane (K, M), either of them absent."""

    _rowwise: Plane | None
    _columnwise: Plane | None
    quantizer: Quantizer

    @staticmethod
    def __new__(
        cls,
        planes: Planes,
        quantizer: Quantizer,
        shape: torch.Size,
        dtype: torch.dtype,
        requires_grad: bool = False,
    ) -> "QuantizedTensor":
        plane = planes.rowwise or planes.columnwise
        if plane is None:
            raise UsageError("a quantized tensor needs at least one plane; quantize with rowwise or columnwise usage")
        self = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=plane.parts["codes"].device, requires_grad=requires_grad
        )
        self._rowwise, self._columnwise = planes
        self.quantizer = quantizer
        return self

    @property
    def planes(self) -> Planes:
        return Planes(self._rowwise, self._columnwise)

    def get_usages(self) -> dict[str, bool]:
        """Which planes are there: what the data says, not what the quantizer would make."""
        return {"rowwise": self._rowwise is not None, "columnwise": self._columnwise is not None}

    def update_usage(self, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Drop (False), keep (None) or demand (True) a plane; a missing one is derived where that is lossless.

        Raises UsageError, before anything changes, where a demanded plane cannot be derived.
        """
        row, col = self._rowwise, self._columnwise
        if rowwise and row is None:
            row = _derive(col, "rowwise")
        if columnwise and col is None:
            col = _derive(row, "columnwise")
        row = None if rowwise is False else row
        col = None if columnwise is False else col
        if row is None and col is None:
            raise UsageError("dropping both planes would lose the values; keep one, or delete the tensor")
        self._rowwise, self._columnwise = row, col

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values in `dtype` (nominal by default), from the more precise plane; on a tie the rowwise one."""
        row, col = self._rowwise, self._columnwise
        if row is not None and (col is None or row.format.precision >= col.format.precision):
            values = row.dequantize(dtype or self.dtype)
        else:
            assert col is not None
            values = col.dequantize(dtype or self.dtype).t()
        return values.reshape(self.shape)

    def quantize_(self, source: Tensor, seed: Tensor | None = None) -> "QuantizedTensor":
        """Rewrite the planes that are there from a tensor of the same shape, in place: buffers keep their address."""
        if source.shape != self.shape:
            raise UserError(f"cannot write shape {tuple(source.shape)} into {tuple(self.shape)}; reshape it first")
        source = source.dequantize() if isinstance(source, QuantizedTensor) else source
        usage = Usage(self._rowwise is not None, self._columnwise is not None)
        flat = source.detach().to(device=self.device, dtype=self.dtype).reshape(_matrix_shape(self.shape))
        fresh = self.quantizer.encode(flat, usage, seed)
        for mine, new in zip(self.planes, fresh, strict=True):
            if mine is None:
                continue
            if new is None or new.format != mine.format:
                raise UserError("the quantizer does not make the planes that the tensor holds; quantize a new tensor")
            for name, part in new.parts.items():
                mine.parts[name].copy_(part)
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        held = ", ".join(
            f"{side}={plane.format.name}"
            for side, plane in (("rowwise", self._rowwise), ("columnwise", self._columnwise))
            if plane is not None
        )
        return f"QuantizedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, {held})"

    def with_planes(self, planes: Planes, shape: torch.Size | None = None) -> "QuantizedTensor":
        """A tensor of the same nominal dtype and quantizer over other planes."""
        return QuantizedTensor(planes, self.quantizer, shape or self.shape, self.dtype)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in OPS:
            return OPS[func](*args, **kwargs)
        plain_args, plain_kwargs = tree_map(_plain, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        if not func._schema.is_mutable:
            return result
        return _write_back(func, args, kwargs, plain_args, plain_kwargs, result)


def quantize(
    x: Tensor, quantizer: Quantizer, usage: Usage | None = None, seed: Tensor | None = None
) -> QuantizedTensor:
    """(*lead, K) -> a quantized tensor of the same nominal shape and dtype."""
    planes = quantizer.encode(x.detach().reshape(_matrix_shape(x.shape)), usage or Usage(), seed)
    return QuantizedTensor(planes, quantizer, x.shape, x.dtype)


def _matrix_shape(shape: torch.Size) -> tuple[int, int]:
    if not shape:
        raise UserError("a 0-dimensional tensor has no rows to quantize; reshape it to (1, 1)")
    rows = 1
    for extent in shape[:-1]:
        rows *= extent
    return rows, shape[-1]


def _derive(other: Plane | None, missing: str) -> Plane:
    derived = None if other is None else other.transposed()
    if derived is None:
        held = "nothing" if other is None else other.format.name
        raise UsageError(
            f"the {missing} plane is absent and cannot be derived from {held}; quantize it with that usage"
        )
    return derived


def _plain(value: Any) -> Any:
    return value.dequantize() if isinstance(value, QuantizedTensor) else value


def _write_back(func: Any, args: Any, kwargs: Any, plain_args: Any, plain_kwargs: Any, result: Any) -> Any:
    """Requantize every argument that the schema says was written; arguments are matched by name."""
    returned = result
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[i] if i < len(args) else kwargs.get(argument.name)
        computed = plain_args[i] if i < len(plain_args) else plain_kwargs.get(argument.name)
        pairs = zip(given, computed, strict=True) if isinstance(given, list | tuple) else [(given, computed)]
        for target, value in pairs:
            if isinstance(target, QuantizedTensor):
                target.quantize_(value)
                returned = target if value is result else returned
    return returned


def _op(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(implementation: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            OPS[function] = implementation
        return implementation

    return add


def _map_parts(t: QuantizedTensor, change: Callable[[Tensor], Tensor]) -> QuantizedTensor:
    def one(plane: Plane | None) -> Plane | None:
        if plane is None:
            return None
        return Plane(plane.format, {name: change(part) for name, part in plane.parts.items()}, plane.shape)

    return t.with_planes(Planes(one(t._rowwise), one(t._columnwise)))


@_op(aten.detach.default, aten.alias.default)
def _detach(t: QuantizedTensor) -> QuantizedTensor:
    return t.with_planes(t.planes)


@_op(aten.clone.default)
def _clone(t: QuantizedTensor, memory_format: Any = None) -> QuantizedTensor:
    return _map_parts(t, torch.clone)


@_op(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(t: QuantizedTensor, shape: list[int]) -> Tensor:
    target = torch.empty(t.shape, device="meta").view(shape).shape
    if target and target[-1] == t.shape[-1]:
        return t.with_planes(t.planes, target)
    return t.dequantize().view(shape)


@_op(aten._to_copy.default)
def _to_copy(t: QuantizedTensor, **kwargs: Any) -> Tensor:
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    if dtype is not None and dtype != t.dtype:
        return aten._to_copy.default(t.dequantize(), **kwargs)
    return _map_parts(t, lambda part: part.to(device=device or part.device, copy=True))


@_op(aten.copy_.default)
def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, QuantizedTensor):
        return target.copy_(_plain(source), non_blocking)
    if not isinstance(source, QuantizedTensor) or not _same_layout(target, source):
        return target.quantize_(source)
    for mine, theirs in zip(target.planes, source.planes, strict=True):
        if mine is not None and theirs is not None:
            for name, part in mine.parts.items():
                part.copy_(theirs.parts[name], non_blocking)
    return target


def _same_layout(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """Whether the two hold the same planes in the same formats, so that bytes can be copied."""

    def formats(t: QuantizedTensor) -> list[str | None]:
        return [None if plane is None else plane.format.name for plane in t.planes]

    return a.shape == b.shape and formats(a) == formats(b)
