"""What casts of kernels allocate, for tensors without values, and their parts by name."""

from collections.abc import Sequence

from torch import Tensor

from duotone.dispatch.casts import is_two_level
from duotone.formats import Format, Parts


def empty_planes(x: Tensor, row: Format | None, col: Format | None) -> list[Tensor]:
    """The parts of both planes of (M, K), each in the order of its format. A scale of both planes comes once.

    A plane whose format is None has none.
    """
    m, k = x.shape
    of_row, of_col = _empty_parts(row, x, m, k), _empty_parts(col, x, k, m)
    is_shared = row is not None and row == col and row.is_derivable and of_row[1].dim() == 1
    return [*of_row, *(of_col[:1] if is_shared else of_col)]


def _empty_parts(fmt: Format | None, x: Tensor, m: int, k: int) -> list[Tensor]:
    """In the memory order of `duotone.kernels.cast`: scales of a column of 1 x C blocks lie together."""
    if fmt is None:
        return []
    lies_turned = fmt.block.rows == 1 and fmt.block.cols > 0 and not is_two_level(fmt)
    parts = list[Tensor]()
    for name, spec in fmt.parts(m, k).items():
        is_turned = lies_turned and name == "scale"
        part = x.new_empty(spec.shape[::-1] if is_turned else spec.shape, dtype=spec.dtype)
        parts.append(part.t() if is_turned else part)
    return parts


def named_parts(row: Format | None, col: Format | None, parts: Sequence[Tensor]) -> tuple[Parts, Parts]:
    """These parts as those of each plane by name."""
    row_names, col_names = ("" if fmt is None else fmt.part_names for fmt in (row, col))
    of_row = dict(zip(row_names, parts, strict=False))
    of_col = dict(zip(col_names, parts[len(of_row) :], strict=False))
    if len(of_col) < len(col_names):
        of_col["scale"] = of_row["scale"]
    return of_row, of_col
