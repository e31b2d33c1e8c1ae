"""Casts as one op of a graph, so that a compiler sees shapes and not kernels."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from duotone.dispatch.casts import cast_of, is_two_level
from duotone.formats import Format, Parts, get
from duotone.graph_ops import define_op

if TYPE_CHECKING:
    from duotone.kernels.cast import Cast
    from duotone.kernels.nvfp4 import Cast as TwoLevelCast


def cast_planes(
    x: Tensor,
    row: str,
    col: str,
    propagate: bool,
    scale: Tensor | None,
    seed: Tensor | None = None,
    live: Tensor | None = None,
) -> list[Tensor]:
    """The parts of the rowwise and of the columnwise plane of a matrix (M, K), each in the order of its format.

    A plane whose name is "" has none. A scale of both planes comes once. `seed`, int64 (1,), if a plane rounds
    stochastically.
    """
    if x.numel() == 0:
        return [part.fill_(0) for part in empty_planes(x, row, col)]
    kernel, row_delayed = _cast_of(row, col, x.dtype, propagate)
    scales = (scale, None) if row_delayed else (None, scale)
    seeds = () if seed is None else (seed,)
    of_row, of_col = kernel(x if x.is_contiguous() else x.contiguous(), scales, live, (None, None), *seeds)
    return [*_results(of_row, None), *_results(of_col, of_row)]


def _results(plane: Parts | None, other: Parts | None) -> Iterator[Tensor]:
    """The parts of a plane as results of an op, which may share no memory. Only amaxes of rows are views."""
    if plane is None:
        return
    for name, part in plane.items():
        if other is None or part is not other[name]:
            is_view = name == "amax" and part.untyped_storage().nbytes() > part.nbytes
            yield part.clone() if is_view else part


@cache
def _cast_of(row: str, col: str, dtype: torch.dtype, propagate: bool) -> "tuple[Cast | TwoLevelCast, bool]":
    """The cast to formats of these names, and whether the rowwise plane has a delayed scale."""
    cast = cast_of(_format(row), _format(col), dtype, propagate)
    assert cast is not None
    return cast, row != "" and get(row).is_delayed


def _format(name: str) -> Format | None:
    return get(name) if name else None


def empty_planes(x: Tensor, row: str, col: str) -> list[Tensor]:
    """The results of `cast_planes`, without values."""
    m, k = x.shape
    of_row, of_col = _empty_parts(row, x, m, k), _empty_parts(col, x, k, m)
    is_shared = row == col and get(row).is_derivable and of_row[1].dim() == 1
    return [*of_row, *(of_col[:1] if is_shared else of_col)]


def _empty_parts(name: str, x: Tensor, m: int, k: int) -> list[Tensor]:
    """In the memory order of `duotone.kernels.cast`: scales of a column of 1 x C blocks lie together."""
    if not name:
        return []
    fmt = get(name)
    parts = {part: x.new_empty(spec.shape, dtype=spec.dtype) for part, spec in fmt.parts(m, k).items()}
    if fmt.block.rows == 1 and fmt.block.cols > 0 and not is_two_level(fmt):
        parts["scale"] = parts["scale"].new_empty(parts["scale"].shape[::-1]).t()
    return [*parts.values()]


def named_parts(row: Format | None, col: Format | None, parts: Sequence[Tensor]) -> tuple[Parts, Parts]:
    """The results of the op as the parts of each plane by name."""
    row_names, col_names = ("" if fmt is None else fmt.part_names for fmt in (row, col))
    of_row = dict(zip(row_names, parts, strict=False))
    of_col = dict(zip(col_names, parts[len(of_row) :], strict=False))
    if len(of_col) < len(col_names):
        of_col["scale"] = of_row["scale"]
    return of_row, of_col


def _shapes(x: Tensor, row: str, col: str, *_: object) -> list[Tensor]:
    return empty_planes(x, row, col)


define_op(
    "cast_planes(Tensor x, str row, str col, bool propagate, Tensor? scale, Tensor? seed=None) -> Tensor[]",
    cast_planes,
    _shapes,
    devices=("CUDA",),
)
