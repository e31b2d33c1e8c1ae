"""Pickles of quantized tensors: bytes and format names, nothing live, readable with torch.load(weights_only=True)."""

import copyreg
import math
from typing import Any

import torch
from torch import Tensor, nn

from duotone import formats
from duotone.errors import UserError
from duotone.tensor.history import History
from duotone.tensor.plane import Plane, Planes
from duotone.tensor.plane_tensor import HIGH_PRECISION_DTYPES
from duotone.tensor.quantized import QuantizedTensor
from duotone.tensor.quantizer import Quantizer

VERSION = 1
DERIVED = "derived"
"""In place of a columnwise plane that is a view of the rowwise one."""


def _describe(plane: Plane | None) -> Any:
    return None if plane is None else (plane.format.name, plane.shape, dict(plane.parts))


def _plane(described: Any) -> Plane | None:
    if described is None:
        return None
    if not isinstance(described, tuple) or len(described) != 3 or not isinstance(described[2], dict):
        raise UserError(f"a pickled plane is a format, a shape and buffers; got {_short(described)}: save it again")
    name, shape, parts = described
    fmt, shape = formats.get(name), _extents(shape, 2)
    specs, codes = fmt.parts(*shape), parts.get("codes")
    own = codes.dtype if isinstance(codes, Tensor) and codes.dtype in HIGH_PRECISION_DTYPES else None
    wanted = {part: (spec.shape, spec.dtype or own, torch.strided) for part, spec in specs.items()}
    got = {n: (tuple(p.shape), p.dtype, p.layout) for n, p in parts.items() if type(p) is Tensor}
    overlapping = fmt.scale_codec != "" and any(
        _overlaps(p) for p in parts.values() if type(p) is Tensor
    )  # a later write would meet itself
    if wanted != got or len(got) != len(parts) or len({p.device for p in parts.values()}) != 1 or overlapping:
        raise UserError(f"the buffers of a pickled {name} plane are not those of a {shape} matrix; save it again")
    return Plane(fmt, dict(parts), (shape[0], shape[1]))


def _overlaps(buffer: Tensor) -> bool:
    """Whether two elements may share a place in memory."""
    reach = 0
    for stride, size in sorted(zip(buffer.stride(), buffer.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _extents(shape: Any, count: int | None = None) -> tuple[int, ...]:
    """A pickled shape. UserError where it is none, or has another number of extents than `count`."""
    right = isinstance(shape, tuple | list) and all(type(n) is int and n >= 0 for n in shape)
    if not right or len(shape) != (len(shape) if count is None else count):
        raise UserError(f"a pickled shape holds integers of at least 0; got {_short(shape)}: save it again")
    return tuple(shape)


def _planes(rowwise: Any, columnwise: Any, shape: tuple[int, ...]) -> Planes:
    """Both planes. UserError where they are not of one matrix of that many elements."""
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


def _quantizer(described: Any) -> Quantizer:
    """One of its own, or a tuple of names."""
    if isinstance(described, Quantizer):
        return described
    if not isinstance(described, tuple) or len(described) != 4 or not isinstance(described[3], History | None):
        raise UserError(f"a pickled quantizer is two formats, a source and a history; got {_short(described)}")
    row, col, source, history = described
    return Quantizer(row and formats.get(row), col and formats.get(col), source, history)


def _short(value: Any) -> str:
    return " ".join(repr(value).split())[:60]


def rebuild(version: int, *fields: Any) -> Tensor:
    """A tensor from its pickled form, in which a quantizer that is no subclass is a tuple of names.

    UserError where what was pickled does not fit together: a kernel would read or write past a buffer.
    """
    if version != VERSION:
        raise UserError(f"a quantized tensor of pickle version {version}; this release reads {VERSION}: convert it")
    if len(fields) != 6:
        raise UserError(f"a pickled quantized tensor has 6 fields; got {len(fields)}: save it again")
    rowwise, columnwise, quantizer, shape, dtype, parameter = fields
    shape = _extents(shape)
    if dtype not in HIGH_PRECISION_DTYPES or parameter not in (None, True, False):
        raise UserError(f"a pickled quantized tensor is in bf16, fp16 or fp32; got {_short(dtype)}: save it again")
    tensor = QuantizedTensor(_planes(rowwise, columnwise, shape), _quantizer(quantizer), torch.Size(shape), dtype)
    return tensor if parameter is None else nn.Parameter(tensor, requires_grad=parameter)


def _reduce(t: QuantizedTensor) -> Any:
    quantizer: Any = t.quantizer
    if type(quantizer) is Quantizer:
        row, col = quantizer.rowwise, quantizer.columnwise
        quantizer = (row and row.name, col and col.name, quantizer.columnwise_source, quantizer.history)
    # An nn.Parameter brings its requires_grad.
    parameter = t.requires_grad if isinstance(t, nn.Parameter) else None
    row, col = t.planes
    aliased = t.planes.aliased
    described = (_describe(row), DERIVED if aliased else _describe(col))
    return rebuild, (VERSION, *described, quantizer, tuple(t.shape), t.dtype, parameter)


copyreg.pickle(QuantizedTensor, _reduce)  # type: ignore[arg-type]
torch.serialization.add_safe_globals([rebuild, formats.get, History])
torch.serialization.add_safe_globals([(formats.IDENTITY, "duotone.formats.identity.IDENTITY")])  # type: ignore[list-item]
