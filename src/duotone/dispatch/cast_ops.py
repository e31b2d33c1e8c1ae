"""Casts as ops of a graph, so that a compiler sees shapes and not kernels."""

from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from duotone.allocate import allocator
from duotone.dispatch.casts import cast_of
from duotone.formats import Format, get
from duotone.graph_ops import define_op

if TYPE_CHECKING:
    from duotone.kernels.cast import Cast
    from duotone.kernels.nvfp4 import Cast as TwoLevelCast

PARTS = ("codes", "scale", "amax")
"""What an op gives of each plane; the first two where no plane has an amax."""


def cast_planes(
    x: Tensor, row: str, col: str, propagate: bool, scale: Tensor | None, live: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Codes and scales of the rowwise and of the columnwise plane of (M, K); both empty where a name is "".

    The scale of the columnwise plane is empty if it is that of the rowwise one.
    """
    if x.numel() == 0:
        return tuple(part.fill_(0) for part in empty_planes(x, row, col))
    kernel, row_delayed = _cast_of(row, col, x.dtype, propagate)
    scales = (scale, None) if row_delayed else (None, scale)
    of_row, of_col = kernel(x if x.is_contiguous() else x.contiguous(), scales, live)
    nothing = partial(allocator(x), (0,), (1,), x.dtype)
    parts: list[Tensor] = []
    for one in (of_row, of_col):
        parts += [nothing(), nothing()] if one is None else [one["codes"], one["scale"]]
    if of_row is not None and parts[1] is parts[3]:
        parts[3] = nothing()  # results of an op may not share memory
    return tuple(parts)


@cache
def _cast_of(row: str, col: str, dtype: torch.dtype, propagate: bool) -> "tuple[Cast | TwoLevelCast, bool]":
    """The cast to formats of these names, and whether the rowwise plane has a delayed scale."""
    cast = cast_of(_format(row), _format(col), dtype, propagate)
    assert cast is not None
    return cast, row != "" and get(row).is_delayed


def empty_planes(x: Tensor, row: str, col: str) -> tuple[Tensor, ...]:
    """What `cast_planes` gives, without values."""
    parts: list[Tensor] = []
    for name, (m, k) in ((row, (x.shape[0], x.shape[1])), (col, (x.shape[1], x.shape[0]))):
        fmt = _format(name)
        parts += [x.new_empty(0), x.new_empty(0)] if fmt is None else _empty_parts(fmt, x, m, k)
    if row == col and get(row).is_derivable and parts[1].shape == (1,):
        parts[3] = x.new_empty(0)
    return tuple(parts)


def _empty_parts(fmt: Format, x: Tensor, m: int, k: int) -> list[Tensor]:
    """In the memory order of `duotone.kernels.cast`: scales of a column of 1 x C blocks lie together."""
    specs = fmt.parts(m, k)
    codes, scale = specs["codes"], specs["scale"]
    turned = fmt.block.rows == 1 and len(scale.shape) == 2 and fmt.block.cols > 0
    memory = x.new_empty(scale.shape[::-1] if turned else scale.shape, dtype=scale.dtype)
    return [x.new_empty(codes.shape, dtype=codes.dtype), memory.t() if turned else memory]


def _format(name: str) -> Format | None:
    return get(name) if name else None


def cast_two_level(x: Tensor, row: str, col: str, propagate: bool, seed: Tensor | None) -> tuple[Tensor, ...]:
    """Codes, scales and amax of the rowwise and of the columnwise plane of (M, K); all empty where a name is "".

    `seed`, int64 (1,), if a plane rounds stochastically.
    """
    if x.numel() == 0:
        return tuple(part.fill_(0) for part in _empty_two_level(x, row, col))
    kernel, _ = _cast_of(row, col, x.dtype, propagate)
    seeds = () if seed is None else (seed,)
    parts: list[Tensor] = []
    for one in kernel(x if x.is_contiguous() else x.contiguous(), (None, None), None, None, *seeds):
        # The amaxes of rows are views, which results of an op may not be.
        parts += _nothing(x) if one is None else [one["codes"], one["scale"], one["amax"].clone()]
    return tuple(parts)


def _nothing(x: Tensor) -> list[Tensor]:
    return [x.new_empty(0) for _ in PARTS]


def _empty_two_level(x: Tensor, row: str, col: str) -> tuple[Tensor, ...]:
    parts: list[Tensor] = []
    for name, shape in ((row, (x.shape[0], x.shape[1])), (col, (x.shape[1], x.shape[0]))):
        specs = get(name).parts(*shape).values() if name else ()
        parts += [x.new_empty(spec.shape, dtype=spec.dtype) for spec in specs] or _nothing(x)
    return tuple(parts)


def _fake(x: Tensor, row: str, col: str, *_: object) -> tuple[Tensor, ...]:
    return empty_planes(x, row, col)


def _fake_two_level(x: Tensor, row: str, col: str, *_: object) -> tuple[Tensor, ...]:
    return _empty_two_level(x, row, col)


_CAST = "Tensor x, str row, str col, bool propagate"
_PLANES = f"cast_planes({_CAST}, Tensor? scale) -> (Tensor, Tensor, Tensor, Tensor)"
_TWO_LEVEL = f"cast_two_level({_CAST}, Tensor? seed) -> ({', '.join(['Tensor'] * 6)})"
define_op(_PLANES, cast_planes, _fake, devices=("CUDA",))
define_op(_TWO_LEVEL, cast_two_level, _fake_two_level, devices=("CUDA",))
