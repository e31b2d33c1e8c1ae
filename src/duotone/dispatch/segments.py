"""Row segments of one matrix, one for each linear: their places, for casts and products that take all of them."""

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from duotone.capture import is_capturing
from duotone.dispatch.casts import PLAIN_TYPES, has_kernels

if TYPE_CHECKING:
    from duotone.kernels.grouped import Scattered
    from duotone.kernels.segment_cast import Segments, Table

STEP = 16
"""If each segment has a separate product, its columns of codes are a multiple of this."""
CHUNK = 128
"""The multiple if one product takes all segments."""
MOST = 1024
"""The most segments of one product: kernels read the ends of all of them at once."""
REMEMBERED = 4096

_TABLES: dict[tuple[tuple[int, ...], torch.dtype, int | None, int], Tensor] = {}


def width(rows: int, multiple: int = STEP) -> int:
    """The columns of codes of a segment with `rows` rows. The last columns are zeros."""
    return -(-rows // multiple) * multiple


def are_real(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether kernels take the tensors: none is traced, fake or on another device, and x is not empty."""
    if not has_kernels(x) or weights[0].device != x.device:
        return False
    return all([type(w) in PLAIN_TYPES for w in weights])


def segments_of(splits: Sequence[int] | Tensor, like: Tensor, grouped: bool = False) -> "Segments":
    """Segments with these numbers of rows, of a matrix like `like`.

    Counts on the device (a tensor) are not waited for; they need one product for all segments, `grouped`.
    """
    if isinstance(splits, Tensor):
        from duotone.kernels.segment_cast import segments_of as device_segments

        return device_segments(splits.to(like.device, non_blocking=True), like.shape[0])
    from duotone.kernels.segment_cast import Segments

    multiple = CHUNK if grouped else STEP
    ends = tuple(itertools.accumulate(splits))
    wide = tuple(itertools.accumulate([width(n, multiple) for n in splits]))
    both = _remembered((*ends, *wide), torch.int32, like.device)
    return Segments(both, len(splits), ends[-1], wide[-1], grouped, tuple(splits))


def equal_segments(rows: int, count: int, like: Tensor) -> "Segments":
    """Segments of the same number of rows, a multiple of STEP."""
    from duotone.kernels.segment_cast import Segments

    ends = tuple(range(rows, rows * count + 1, rows))
    return Segments(_remembered((*ends, *ends), torch.int32, like.device), count, rows * count, rows * count)


def table(tensors: Sequence[Tensor]) -> "Table":
    """The places of the tensors, from the first one on."""
    from duotone.kernels.segment_cast import Table

    first = tensors[0]
    base, size = first.data_ptr(), first.itemsize
    offsets = tuple([(t.data_ptr() - base) // size for t in tensors])
    return Table(_remembered(offsets, torch.int64, first.device), not any([n % STEP for n in offsets]))


def scattered(codes: Sequence[Tensor], scales: Sequence[Tensor]) -> "Scattered | None":
    """Contiguous FP8 codes (N, K) of each segment as one operand; their scales lie behind the first one's.

    None if the distances in memory have no common step that a kernel takes.
    """
    from duotone.kernels.grouped import Scattered

    addresses, first = [one.data_ptr() for one in codes], scales[0].data_ptr()
    low = min(addresses)
    step = math.gcd(*[n - low for n in addresses]) or codes[0].numel()
    count = (max(addresses) - low) // step + 1
    if step % STEP or low % STEP or count >= 1 << 31:
        return None
    places = *[(n - low) // step for n in addresses], *[(one.data_ptr() - first) // one.itemsize for one in scales]
    base = codes[addresses.index(low)]
    return Scattered(base, count, step, _remembered(places, torch.int64, base.device))


def _remembered(values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`_on_device`, remembered for the next call on the same stream. A graph that captures has separate tensors."""
    if is_capturing():
        return _on_device(values, dtype, device)
    key = (values, dtype, device.index, torch._C._cuda_getCurrentRawStream(device.index))
    tensor = _TABLES.get(key)
    if tensor is None:
        if len(_TABLES) >= REMEMBERED:
            _TABLES.clear()
        tensor = _TABLES[key] = _on_device(values, dtype, device)
    return tensor


def _on_device(values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Integers on the device, without waiting for it: the driver stages what is copied from pageable memory."""
    if is_capturing():  # such a copy is refused
        return torch.stack([torch.full((), n, dtype=dtype, device=device) for n in values])
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def row_sums(x: Tensor, segments: "Segments") -> Tensor:
    """(E, N) sums over the rows of each segment of contiguous (M, N)."""
    from duotone.kernels.grouped import sums

    return sums(x, segments)
