"""The buffers of an encoded plane, by name, and how each one shards."""

from dataclasses import dataclass

import torch
from torch import Tensor

Parts = dict[str, Tensor]


@dataclass(frozen=True)
class PartSpec:
    """One buffer: its shape, its dtype, and how many logical rows each entry of its first dimension covers.

    `rows_per_entry` is None where the buffer describes the whole matrix and every shard needs a copy.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows_per_entry: int | None
