"""Casts of both planes as own ops, so that compilers see shapes and not kernels."""

import torch
from torch import Tensor

from duotone.dispatch.casts import one_read
from duotone.formats import Format, get

_LIBRARY = torch.library.Library("duotone", "FRAGMENT")
_LIBRARY.define(
    "cast_planes(Tensor x, str row, str col, bool propagate, Tensor? scale) -> (Tensor, Tensor, Tensor, Tensor)"
)


def cast(
    x: Tensor, row: str, col: str, propagate: bool, scale: Tensor | None, live: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Codes and scales of the rowwise and of the columnwise plane of (M, K); both empty where a name is ""."""
    if x.numel() == 0:
        return tuple(part.fill_(0) for part in empty(x, row, col))
    kernel = one_read(_format(row), _format(col), x, propagate)
    delayed = row and get(row).is_delayed
    scales = (scale, None) if delayed else (None, scale)
    assert kernel is not None
    planes = kernel(x if x.is_contiguous() else x.contiguous(), scales, live)
    parts: list[Tensor] = []
    for one in planes:
        parts += [x.new_empty(0), x.new_empty(0)] if one is None else [one["codes"], one["scale"]]
    if planes[0] is not None and planes[1] is not None and planes[0]["scale"] is planes[1]["scale"]:
        parts[3] = parts[3].clone()  # results of an op may not share memory
    return tuple(parts)


def empty(x: Tensor, row: str, col: str) -> tuple[Tensor, ...]:
    """What `cast` gives, without values."""
    parts: list[Tensor] = []
    for name, (m, k) in ((row, (x.shape[0], x.shape[1])), (col, (x.shape[1], x.shape[0]))):
        fmt = _format(name)
        parts += [x.new_empty(0), x.new_empty(0)] if fmt is None else _parts(fmt, x, m, k)
    return tuple(parts)


def _parts(fmt: Format, x: Tensor, m: int, k: int) -> list[Tensor]:
    """In the memory order of `duotone.kernels.cast`: scales of a column of 1 x C blocks lie together."""
    specs = fmt.parts(m, k)
    codes, scale = specs["codes"], specs["scale"]
    turned = fmt.block.rows == 1 and len(scale.shape) == 2 and fmt.block.cols > 0
    memory = x.new_empty(scale.shape[::-1] if turned else scale.shape, dtype=scale.dtype)
    return [x.new_empty(codes.shape, dtype=codes.dtype), memory.t() if turned else memory]


def _format(name: str) -> Format | None:
    return get(name) if name else None


def _fake(x: Tensor, row: str, col: str, propagate: bool, scale: Tensor | None) -> tuple[Tensor, ...]:
    return empty(x, row, col)


_LIBRARY.impl("cast_planes", cast, "CUDA")
_LIBRARY.impl("cast_planes", _fake, "Meta")
