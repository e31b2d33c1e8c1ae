"""The cast of a matrix like one that was cast before: the same launches on other addresses, at the least host time."""

from collections.abc import Callable

import torch
from torch import Tensor

from duotone.allocate import empty_cuda
from duotone.kernels.amax import Amaxes
from duotone.kernels.launch import Repeat

Allocation = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Size, strides and dtype."""
Allocations = tuple[Allocation, Allocation | None]
"""Of codes and scale; None for a scale that is the other plane's."""
MaybeParts = dict[str, Tensor] | None
RepeatedCast = Callable[[int, Tensor | None, Tensor | None, Tensor | None], tuple[MaybeParts, MaybeParts]]
"""Takes the address of the matrix, the given scales of both planes and `live`, as `Cast` does."""

NO_PRODUCER = (None,) * 5
"""Where a fused producer has its other inputs."""
Measure = Callable[[int], Amaxes]
"""From the address of a matrix to the amaxes that each plane reads."""


def repeated_cast(
    repeat: Repeat,
    measure: Measure | None,
    measured: tuple[bool, bool],
    row: Allocations | None,
    col: Allocations | None,
) -> RepeatedCast:
    """`measured` are the planes whose scales follow from the amaxes of `measure`."""
    of_row, of_col = measured

    def cast(
        address: int, row_from: Tensor | None, col_from: Tensor | None, live: Tensor | None
    ) -> tuple[MaybeParts, MaybeParts]:
        if measure is not None:
            rows, cols = measure(address)
            row_from, col_from = rows if of_row else row_from, cols if of_col else col_from
        row_parts = col_parts = row_codes = row_scale = col_codes = col_scale = scale = None
        if row is not None:
            codes, scale = empty_cuda(*row[0]), empty_cuda(*row[1])
            row_parts = {"codes": codes, "scale": scale}
            row_codes, row_scale = codes.data_ptr(), scale.data_ptr()
        if col is not None:
            codes = empty_cuda(*col[0])
            if col[1] is not None:
                scale = empty_cuda(*col[1])
            col_parts = {"codes": codes, "scale": scale}
            col_codes, col_scale = codes.data_ptr(), scale.data_ptr()
        of_sources = [None if source is None else source.data_ptr() for source in (row_from, col_from, live)]
        repeat(address, *NO_PRODUCER, row_codes, row_scale, col_codes, col_scale, *of_sources, None)
        return row_parts, col_parts

    return cast
