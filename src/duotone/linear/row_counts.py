"""How many rows each linear of a group has: checked before anything runs."""

from collections.abc import Sequence
from numbers import Integral
from typing import cast

import torch
from torch import Tensor

from duotone.errors import UserError


class Rows:
    """How many rows each of `experts` linears has, `total` in all.

    `counts` is int64 on the device. `splits` is on the host, which waits for it.
    """

    def count(self) -> Tensor:
        """`counts`, computed anew. Choices are known to be among the experts."""
        raise NotImplementedError

    experts: int
    total: int
    counts: Tensor
    splits: tuple[int, ...]
    waits = True
    """Whether the host may wait for `splits`. If not, `counts` are used wherever possible, and may leave rows out."""


def host_splits(splits: Tensor | Sequence[int], count: int, rows: int | None) -> tuple[int, ...]:
    """The rows of each of `count` linears as integers. Waits for a tensor on a device.

    UserError unless they are as many as the linears, not negative, and sum to `rows`.
    """
    if isinstance(splits, Tensor):
        if splits.dtype not in (torch.int64, torch.int32) or splits.dim() != 1:
            got = f"{tuple(splits.shape)} in {splits.dtype}"
            raise UserError(f"m_splits is a list of integers or an int tensor of one dimension; got {got}")
        if splits.is_meta:
            raise UserError("m_splits is on meta, where it has no values; give a list of integers")
        splits = cast(list[int], splits.tolist())
    if not isinstance(splits, Sequence) or isinstance(splits, str):
        raise UserError(f"m_splits is a list of integers or an int tensor; got {type(splits).__name__}")
    whole = all([type(n) is int or (isinstance(n, Integral) and not isinstance(n, bool)) for n in splits])
    if len(splits) != count or not whole or min(splits) < 0:
        raise UserError(f"m_splits needs {count} row counts, integers that are not negative; got {_short(splits)}")
    counts = tuple(map(int, splits))
    if rows is not None and sum(counts) != rows:
        raise UserError(
            f"m_splits {_short(counts)} sum to {sum(counts)}, and the input has {rows} rows; cover each once"
        )
    return counts


def device_splits(splits: Tensor, count: int) -> Tensor:
    """The rows of each of `count` linears, on the device. Nothing waits for them or checks their sum.

    UserError unless they are as many as the linears.
    """
    if splits.dtype not in (torch.int64, torch.int32) or splits.shape != (count,):
        got = f"{tuple(splits.shape)} in {splits.dtype}"
        raise UserError(f"m_splits is {count} row counts, a list of integers or an int tensor; got {got}")
    return splits


def _short(counts: Sequence[object]) -> str:
    return str(list(counts)) if len(counts) <= 16 else f"{len(counts)} values from {counts[0]} to {counts[-1]}"
