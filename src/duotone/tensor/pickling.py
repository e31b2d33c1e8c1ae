"""Pickles of quantized tensors: bytes and format names, nothing live, readable with torch.load(weights_only=True)."""

import copyreg
from typing import Any

import torch
from torch import Tensor, nn

from duotone import formats
from duotone.errors import UserError
from duotone.tensor.history import History
from duotone.tensor.plane import Plane, Planes
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
    name, shape, parts = described
    fmt, shape = formats.get(name), (shape[0], shape[1])
    specs = fmt.parts(*shape)
    if {n: (s.shape, s.dtype or parts["codes"].dtype) for n, s in specs.items()} != {
        n: (tuple(p.shape), p.dtype) for n, p in parts.items()
    }:
        raise UserError(f"the buffers of a pickled {name} plane are not those of a {shape} matrix; save it again")
    return Plane(fmt, dict(parts), shape)


def rebuild(version: int, *fields: Any) -> Tensor:
    """A tensor from its pickled form, in which a quantizer that is no subclass is a tuple of names."""
    if version != VERSION:
        raise UserError(f"a quantized tensor of pickle version {version}; this release reads {VERSION}: convert it")
    rowwise, columnwise, quantizer, shape, dtype, parameter = fields
    row = _plane(rowwise)
    planes = Planes(row, row.transposed() if row and columnwise == DERIVED else _plane(columnwise))
    if isinstance(quantizer, tuple):
        row, col, source, history = quantizer
        quantizer = Quantizer(row and formats.get(row), col and formats.get(col), source, history)
    tensor = QuantizedTensor(planes, quantizer, torch.Size(shape), dtype)
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
