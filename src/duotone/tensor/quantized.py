"""QuantizedTensor: the one wrapper subclass, a logical tensor held as up to two planes.

It pretends to be a high-precision tensor of its nominal dtype and shape. What has no entry in the op table (`ops.py`)
runs on the dequantized values and gives a plain tensor; in-place operations write the result back, quantized. Reading
never needs the quantizer, which only describes the next write.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from duotone.errors import UsageError, UserError
from duotone.tensor.context import LOCAL, QuantizeContext
from duotone.tensor.fsdp import ShardHooks
from duotone.tensor.plane import BOTH, Plane, Planes, Usage

if TYPE_CHECKING:
    from duotone.tensor.quantizer import Quantizer

OPS: dict[Any, Callable[..., Any]] = {}
"""aten op -> its implementation on quantized tensors."""

INIT_VALUE = "_high_precision_init_val"
SIDES = ("rowwise", "columnwise")
HIGH_PRECISION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class QuantizedTensor(ShardHooks, torch.Tensor):
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
        """Drop (False), keep (None) or demand (True) a plane; a missing one is derived where that is lossless.

        Raises UsageError, before anything changes, where a demanded plane cannot be derived. Without planes the tensor
        is an empty shell that still knows its shape.
        """
        row, col = self._rowwise, self._columnwise
        if rowwise and row is None:
            row = self._derive(col, "rowwise")
        if columnwise and col is None:
            col = self._derive(self._rowwise, "columnwise")
        self._rowwise = None if rowwise is False else row
        self._columnwise = None if columnwise is False else col

    def _derive(self, other: Plane | None, missing: str) -> Plane:
        derived = None if other is None else other.transposed()
        if derived is None:
            held = "nothing" if other is None else f"a plane of {other.format.name}"
            remedy = "create it with that usage, or call materialize_usage(allow_requantize=True)"
            raise UsageError(f"{self!r} has no {missing} plane and none follows from {held} without loss; {remedy}")
        return derived

    def materialize_usage(
        self, rowwise: bool = False, columnwise: bool = False, *, allow_requantize: bool = False
    ) -> None:
        """Make planes that are absent; with `allow_requantize` also by encoding the dequantized values anew."""
        wanted = Usage(rowwise and self._rowwise is None, columnwise and self._columnwise is None)
        try:
            self.update_usage(rowwise or None, columnwise or None)
        except UsageError:
            if not allow_requantize:
                raise
            made = self.quantizer.encode(self._matrix(), wanted, self.context)
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
        """`dequantize` without a gradient."""
        row, col = self._rowwise, self._columnwise
        if row is not None and (col is None or row.format.precision >= col.format.precision):
            return row.dequantize(dtype).reshape(self.shape)
        if col is not None:
            return col.dequantize(dtype).t().reshape(self.shape)
        raise UsageError(f"{self!r} holds no plane, so it has no values; keep one plane, or write the tensor anew")

    def quantize_(
        self,
        source: Tensor,
        *,
        noop_flag: Tensor | None = None,
        quantizer: "Quantizer | None" = None,
        usage: Usage = BOTH,
        seed: Tensor | None = None,
    ) -> "QuantizedTensor":
        """Rewrite the held planes that `usage` names from a tensor of the same shape; buffers keep their address.

        A `noop_flag` (fp32, one element, on the device) that is not 0 leaves every byte as it was. `quantizer` is the
        tensor's own where None; it must make the formats that are held.
        """
        if source.shape != self.shape:
            raise UserError(f"cannot write shape {tuple(source.shape)} into {tuple(self.shape)}; reshape it first")
        held = Usage(usage.rowwise and self._rowwise is not None, usage.columnwise and self._columnwise is not None)
        if self.is_piece and any(p is not None and (p.spans(0) or p.spans(1)) for p in self.planes):
            raise UsageError("a piece of a tensor shares its scale with the rest; write the whole tensor")
        values = source.values(self.dtype) if isinstance(source, QuantizedTensor) else source.detach()
        matrix = values.to(device=self.device, dtype=self.dtype).reshape(self.matrix_shape)
        written = quantizer or self.quantizer
        fresh = written.encode(matrix, held, self._write_context(seed))
        for mine, new in zip(self.planes, fresh, strict=True):
            if mine is not None and new is not None and new.format != mine.format:
                raise UserError(
                    f"the quantizer makes {new.format.name} where the tensor holds {mine.format.name}; "
                    "convert it with duotone.convert_parameters"
                )
        for mine, new in zip(self.planes, fresh, strict=True):
            if mine is not None and new is not None:
                mine.copy_(new if noop_flag is None else _unless(noop_flag, mine, new))
        return self

    def _write_context(self, seed: Tensor | None) -> QuantizeContext:
        """Delayed planes without a slot keep the scale they have."""
        context = self.context.with_seed(seed)
        if context.slots == (None, None) and any(p is not None and p.format.is_delayed for p in self.planes):
            kept = tuple(None if p is None else _KeptScale(p.parts["scale"]) for p in self.planes)
            row = kept[0] or kept[1]
            return QuantizeContext(context.shard, (row, kept[1]), context.seed)
        return context

    def _matrix(self) -> Tensor:
        return self.values(self.dtype).reshape(self.matrix_shape)

    def __repr__(self) -> str:  # type: ignore[override]
        held = ", ".join(
            f"{side}={plane.format.name}" for side, plane in zip(SIDES, self.planes, strict=True) if plane is not None
        )
        return f"QuantizedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, {held or 'no planes'})"

    def with_planes(
        self, planes: Planes, shape: torch.Size | None = None, *, dtype: torch.dtype | None = None
    ) -> "QuantizedTensor":
        """A tensor of the same quantizer and context over other planes."""
        shape = self.shape if shape is None else shape
        made = QuantizedTensor(planes, self.quantizer, shape, dtype or self.dtype, device=self.device)
        made.context, made.is_piece = self.context, self.is_piece
        return made

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        """Adopt the planes of a quantized tensor of the same formats; quantize any other one into new buffers."""
        if new.shape != self.shape:
            raise UserError(f"cannot set data of shape {tuple(new.shape)} on {tuple(self.shape)}; make a new tensor")
        if isinstance(new, QuantizedTensor) and same_formats(self, new):
            self._rowwise, self._columnwise = new.planes
            self.quantizer = new.quantizer
            return
        usage = Usage(**self.get_usages())
        matrix = new.to(device=self.device, dtype=self.dtype).reshape(self.matrix_shape)
        if isinstance(matrix, QuantizedTensor):
            matrix = matrix.values(self.dtype)
        made = self.quantizer.encode(matrix.detach(), usage, self._write_context(None))
        self._rowwise, self._columnwise = made

    def update_quantizer(self, quantizer: "Quantizer") -> None:
        """Describe later writes by another quantizer of the same formats; the data stays as it is."""
        offered = (quantizer.rowwise, quantizer.columnwise)
        for mine, theirs in zip(self.planes, offered, strict=True):
            if mine is not None and mine.format != theirs:
                other = "nothing" if theirs is None else theirs.name
                raise UserError(
                    f"the tensor holds {mine.format.name} where the quantizer makes {other}; "
                    "convert it with duotone.convert_parameters"
                )
        self.quantizer = quantizer

    def get_high_precision_init_val(self) -> Tensor | None:
        """The CPU copy of the values before they were quantized, where `quantized_model_init` preserved it."""
        return self.__dict__.get(INIT_VALUE)

    def clear_high_precision_init_val(self) -> None:
        vars(self).pop(INIT_VALUE, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> "QuantizedTensor":
        made = self.with_planes(self.planes.map(torch.clone))
        made.requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, self.requires_grad)
            assert isinstance(made, QuantizedTensor)
        made.context = LOCAL
        if INIT_VALUE in self.__dict__:
            setattr(made, INIT_VALUE, self.__dict__[INIT_VALUE])
        memo[id(self)] = made
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
        return flat, (kinds, planes.aliased, self.quantizer, self.dtype, self.context)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "QuantizedTensor":
        del stride
        kinds, aliased, quantizer, dtype, write_context = context
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
        tensor.context = write_context
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in OPS:
            return OPS[func](*args, **kwargs)
        plain_args, plain_kwargs = tree_map(plain, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        if not func._schema.is_mutable:
            return result
        return _write_back(func, args, kwargs, plain_args, plain_kwargs, result)


class Dequantize(torch.autograd.Function):
    """The values of a quantized tensor; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, t: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = t.dtype
        return t.values(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].to(ctx.dtype), None


class _KeptScale:
    """The slot of a delayed plane that has none: the encode scale that its stored inverse tells."""

    def __init__(self, inverse: Tensor) -> None:
        self.inverse = inverse

    def scale_for(self, x: Tensor) -> Tensor:
        return torch.ones_like(self.inverse) / self.inverse


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """(*lead, K) -> (M, K)."""
    if not shape:
        return 1, 1
    rows = 1
    for extent in shape[:-1]:
        rows *= extent
    return rows, shape[-1]


def plain(value: Any) -> Any:
    """A quantized tensor's values; anything else as it is."""
    return value.values(value.dtype) if isinstance(value, QuantizedTensor) else value


def same_formats(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """Whether the two hold the same planes in the same formats and shapes, so that bytes can be taken over."""

    def kinds(t: QuantizedTensor) -> list[Any]:
        return [None if plane is None else (plane.format, plane.shape) for plane in t.planes]

    return kinds(a) == kinds(b)


def _unless(noop_flag: Tensor, old: Plane, new: Plane) -> Plane:
    keep = noop_flag.reshape(()) != 0
    return Plane(new.format, {n: torch.where(keep, old.parts[n], part) for n, part in new.parts.items()}, new.shape)


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
