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
"""The allocations of codes and scale. None for a scale that both planes share."""
MaybeParts = dict[str, Tensor] | None
RepeatedCast = Callable[[int, Tensor | None, Tensor | None, Tensor | None], tuple[MaybeParts, MaybeParts]]
"""Takes the address of the matrix, the delayed scales of both planes and `live`, as `Cast` does."""

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
        row_at = col_at = amaxes = None
        if measure is not None:
            rows, cols, amaxes = measure(address)
            row_at, col_at = rows if of_row else None, cols if of_col else None
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
        if row_from is not None:
            row_at = row_from.data_ptr()
        if col_from is not None:
            col_at = col_from.data_ptr()
        live_at = None if live is None else live.data_ptr()
        repeat(address, *NO_PRODUCER, row_codes, row_scale, col_codes, col_scale, row_at, col_at, live_at, None)
        del amaxes  # the launches above read them
        return row_parts, col_parts

    return cast
