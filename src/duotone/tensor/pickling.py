"""Pickles of quantized tensors: bytes and format names, nothing live, readable with torch.load(weights_only=True)."""

import copyreg
import math
from collections.abc import Callable, Sequence
from typing import TypeGuard, cast

import torch
from torch import Tensor, nn

from duotone import formats
from duotone.errors import UserError
from duotone.formats import ScaleCodec
from duotone.tensor.history import History
from duotone.tensor.plane import Plane, Planes
from duotone.tensor.plane_tensor import HIGH_PRECISION_DTYPES
from duotone.tensor.quantized import QuantizedTensor
from duotone.tensor.quantizer import Quantizer

VERSION = 1
DERIVED = "derived"
"""In place of a columnwise plane that is a view of the rowwise one."""


def _plane(pickled: object) -> Plane | None:
    if pickled is None:
        return None
    if not _is_tuple(pickled, 3) or not isinstance(pickled[2], dict):
        raise UserError(f"a pickled plane is a format, a shape and buffers; got {_short(pickled)}: save it again")
    name, shape, parts = cast("tuple[str, object, dict[str, object]]", pickled)
    fmt, (rows, cols) = formats.get(name), _extents(shape, 2)
    codes = parts.get("codes")
    nominal = codes.dtype if isinstance(codes, Tensor) and codes.dtype in HIGH_PRECISION_DTYPES else None
    specs = fmt.parts(rows, cols).items()
    expected = {part: (spec.shape, spec.dtype or nominal, torch.strided) for part, spec in specs}
    buffers = {part: buffer for part, buffer in parts.items() if type(buffer) is Tensor}
    fits = expected == {part: (tuple(b.shape), b.dtype, b.layout) for part, b in buffers.items()}
    one_device = len({buffer.device for buffer in buffers.values()}) == 1
    # A write into a buffer that overlaps itself would change values that it wrote before.
    overlapping = fmt.scale_codec is not ScaleCodec.NONE and any(map(_overlaps, buffers.values()))
    if not fits or len(buffers) != len(parts) or not one_device or overlapping:
        size = f"{rows} x {cols}"
        raise UserError(f"the buffers of a pickled {name} plane are not those of a {size} matrix; save it again")
    return Plane(fmt, buffers, (rows, cols))


def _overlaps(buffer: Tensor) -> bool:
    """Whether two elements may share a place in memory."""
    reach = 0
    for stride, size in sorted(zip(buffer.stride(), buffer.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _is_tuple(value: object, count: int) -> TypeGuard[tuple[object, ...]]:
    """Whether a pickled value is a tuple of `count` values."""
    return isinstance(value, tuple) and len(cast("tuple[object, ...]", value)) == count


def _extents(shape: object, count: int | None = None) -> tuple[int, ...]:
    """A pickled shape. UserError if it is not one, or does not have `count` extents."""
    sequence = shape
    if isinstance(sequence, tuple | list):
        numbers = cast("Sequence[object]", sequence)
        extents = tuple(n for n in numbers if type(n) is int and n >= 0)
        if len(extents) == len(numbers) and count in (None, len(numbers)):
            return extents
    raise UserError(f"a pickled shape holds integers of at least 0; got {_short(shape)}: save it again")


def _planes(rowwise: object, columnwise: object, shape: tuple[int, ...]) -> Planes:
    """Both planes. UserError unless they are those of one matrix with the elements of `shape`."""
    row = _plane(rowwise)
    derived = isinstance(columnwise, str) and columnwise == DERIVED
    col = (row and row.transposed()) if derived else _plane(columnwise)
    turned = None if col is None else col.shape[::-1]
    for matrix in (row and row.shape, turned):
        if matrix is not None and math.prod(matrix) != math.prod(shape):
            raise UserError(f"a pickled plane of {matrix} does not hold a tensor of shape {shape}; save it again")
    if (row is not None and turned is not None and row.shape != turned) or (derived and col is None):
        raise UserError(f"the planes of a pickled tensor of shape {shape} are not of one matrix; save it again")
    return Planes(row, col)


def _quantizer(pickled: object) -> Quantizer:
    """A pickled subclass, or a quantizer from the names of its formats."""
    if isinstance(pickled, Quantizer):
        return pickled
    if not _is_tuple(pickled, 4) or not isinstance(pickled[3], History | None):
        raise UserError(f"a pickled quantizer is two formats, a source and a history; got {_short(pickled)}")
    row, col, source, history = cast("tuple[str | None, str | None, str, History | None]", pickled)
    rowwise, columnwise = (None if name is None else formats.get(name) for name in (row, col))
    return Quantizer(rowwise, columnwise, source, history)


def _short(value: object) -> str:
    return " ".join(repr(value).split())[:60]


def rebuild(version: int, *fields: object) -> Tensor:
    """A tensor from its pickled form. A quantizer that is no subclass is pickled as a tuple of names.

    Raises UserError if the fields do not fit together: a kernel would read or write past a buffer.
    """
    if version != VERSION:
        raise UserError(f"a quantized tensor of pickle version {version}; this release reads {VERSION}: convert it")
    if len(fields) != 6:
        raise UserError(f"a pickled quantized tensor has 6 fields; got {len(fields)}: save it again")
    rowwise, columnwise, quantizer, shape, dtype, parameter = fields
    shape = _extents(shape)
    if not isinstance(dtype, torch.dtype) or dtype not in HIGH_PRECISION_DTYPES or parameter not in (None, True, False):
        raise UserError(f"a pickled quantized tensor is in bf16, fp16 or fp32; got {_short(dtype)}: save it again")
    tensor = QuantizedTensor(_planes(rowwise, columnwise, shape), _quantizer(quantizer), torch.Size(shape), dtype)
    return tensor if parameter is None else nn.Parameter(tensor, requires_grad=bool(parameter))


def _pickled(plane: Plane | None) -> object:
    return None if plane is None else (plane.format.name, plane.shape, dict(plane.parts))


def _reduce(t: QuantizedTensor) -> tuple[Callable[..., Tensor], tuple[object, ...]]:
    quantizer: object = t.quantizer
    if type(quantizer) is Quantizer:
        row, col = quantizer.rowwise, quantizer.columnwise
        quantizer = (row and row.name, col and col.name, quantizer.columnwise_source, quantizer.history)
    parameter = t.requires_grad if isinstance(t, nn.Parameter) else None
    rowwise, columnwise = t.planes
    planes = (_pickled(rowwise), DERIVED if t.planes.aliased else _pickled(columnwise))
    return rebuild, (VERSION, *planes, quantizer, tuple(t.shape), t.dtype, parameter)


copyreg.pickle(QuantizedTensor, _reduce)  # type: ignore[arg-type]
torch.serialization.add_safe_globals([rebuild, formats.get, History])
torch.serialization.add_safe_globals([(formats.IDENTITY, "duotone.formats.identity.IDENTITY")])  # type: ignore[list-item]
