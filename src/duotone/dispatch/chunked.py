"""Eager stages in pieces that fit the processor's caches: the form for machines without a C++ compiler."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from duotone.formats.elements import Element
from duotone.formats.stages import PLAIN, Stages

CHUNK = 1 << 16
"""Elements a piece: with its fp32 temporaries it stays within a 1 MiB second-level cache."""


def _pieces(blocks: Tensor) -> tuple[int, int]:
    """The dimension to cut, 0 or 2 (whole blocks only, the one that lies further apart), and blocks a piece."""
    dim = 0 if blocks.shape[2] == 1 or (blocks.shape[0] > 1 and blocks.stride(0) >= blocks.stride(2)) else 2
    per_block = max(1, blocks.numel() // max(1, blocks.shape[dim]))
    return dim, max(1, CHUNK // per_block)


def _chunked(stage: Callable[..., Tensor], blocks: Tensor, *others: Tensor) -> Tensor:
    """Run an elementwise stage piece by piece; `others` broadcast to the blocks. Keeps the strides of `blocks`."""
    dim, step = _pieces(blocks)
    extent = blocks.shape[dim]
    out: Tensor | None = None
    for start in range(0, extent, step):
        length = min(step, extent - start)
        cut = [t.narrow(dim, start, length) if t.dim() == 4 and t.shape[dim] == extent else t for t in others]
        piece = stage(blocks.narrow(dim, start, length), *cut)
        if out is None:
            out = torch.empty_like(blocks, dtype=piece.dtype)
        out.narrow(dim, start, length).copy_(piece)
    return stage(blocks, *others) if out is None else out


class ChunkedStages(Stages):
    """`Stages` with every element-wise stage cut along whole blocks."""

    name = "torch, in cache-sized pieces"

    def amax(self, blocks: Tensor, nan: float = 0.0) -> Tensor:
        if blocks.shape[0] * blocks.shape[2] == 1:
            flat = blocks.reshape(-1) if blocks.is_contiguous() else blocks.squeeze().t().reshape(-1)
            pieces = [PLAIN.amax(piece.view(1, 1, 1, -1), nan) for piece in torch.split(flat, CHUNK)]
            return torch.stack(pieces).amax(dim=0)
        dim, step = _pieces(blocks)
        pieces = [PLAIN.amax(piece, nan) for piece in torch.split(blocks, step, dim)]
        return torch.cat(pieces, dim=0 if dim == 0 else 1)

    def cast(self, blocks: Tensor, multiplier: Tensor, element: Element, marks: bool = False) -> Tensor:
        return _chunked(partial(PLAIN.cast, element=element, marks=marks), blocks, multiplier)

    def cast_stochastic(self, blocks: Tensor, multiplier: Tensor, bits: Tensor, element: Element) -> Tensor:
        return _chunked(partial(PLAIN.cast_stochastic, element=element), blocks, multiplier, bits)

    def values(self, codes: Tensor, factor: Tensor, element: Element, dtype: torch.dtype) -> Tensor:
        return _chunked(partial(PLAIN.values, element=element, dtype=dtype), codes, factor)

    def rotate(self, x: Tensor) -> Tensor:
        rows = max(1, CHUNK // max(1, x.shape[1]))
        return torch.cat([PLAIN.rotate(piece) for piece in torch.split(x, rows)])


CHUNKED = ChunkedStages()
